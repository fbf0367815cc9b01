/* Takes the launches of a step, laid out by launch.py; gives them to the driver, one by one.
 *
 * Compiled by whatever C compiler there is (native.py). No header of CUDA is needed: the driver's
 * functions come as addresses, and their types are those of cuda.h.
 */
#include <stdint.h>

typedef int (*record_fn)(void *event, void *stream);
typedef int (*wait_fn)(void *stream, void *event, unsigned flags);
typedef int (*launch_fn)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                         void *stream, void **parameters, void **extra);

struct item {
    void *function;
    void **parameters;
    uint32_t grid[3];
    uint32_t threads;
    uint32_t shared;
};

struct step {
    record_fn record;
    wait_fn wait;
    launch_fn launch;
    void *side, *begun, *ended;
    struct item *items;
    uint64_t num_items;
};

/* 0, or the first status of the driver that is not. */
int clairai_run(const struct step *step, void *main)
{
    int status = step->record(step->begun, main);
    if (!status)
        status = step->wait(step->side, step->begun, 0);
    for (uint64_t i = 0; i < step->num_items && !status; i++) {
        const struct item *item = &step->items[i];
        status = step->launch(item->function, item->grid[0], item->grid[1], item->grid[2],
                              item->threads, 1, 1, item->shared, step->side, item->parameters, 0);
    }
    return status ? status : step->record(step->ended, step->side);
}
