/* Takes a step of the engine; gives it to the GPU in a few microseconds.
 *
 * Compiled by whatever C compiler there is (local/c_extension.py), and called with Python's lock held. No header
 * of CUDA is needed: the driver's functions come as addresses, with the types of cuda.h.
 */
#include "steady.h"

enum { ON_MAIN = -1, ASIDE = 0 }; /* where a step's launches are; above: CUDA's error */

typedef int (*record_fn)(void *event, void *stream);
typedef int (*wait_fn)(void *stream, void *event, unsigned flags);
typedef int (*launch_fn)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                         void *stream, void **parameters, void **extra);

/* Item and Line of lineup.py */
struct item {
    void *function;
    void **parameters;
    uint32_t grid[3];
    uint32_t threads;
    uint32_t shared;
};

struct line {
    record_fn record;
    wait_fn wait;
    launch_fn launch;
    void *side, *begun, *ended;
    struct item *items;
    uint64_t num_items;
    uint64_t *brief; /* the kernel's argument */
};

static int launch_all(const struct line *line, void *stream)
{
    int status = 0;
    for (uint64_t i = 0; i < line->num_items && !status; i++) {
        const struct item *item = &line->items[i];
        status = line->launch(item->function, item->grid[0], item->grid[1], item->grid[2],
                              item->threads, 1, 1, item->shared, stream, item->parameters, 0);
    }
    return status;
}

/* Behind what the stream `main` was given so far, beside what it is given next. */
static int launch_aside(const struct line *line, void *main)
{
    int status = line->record(line->begun, main);
    if (!status)
        status = line->wait(line->side, line->begun, 0);
    if (!status)
        status = launch_all(line, line->side);
    return status ? status : line->record(line->ended, line->side);
}

/* run(line, ledger, main): the launches of the brief that was written last. */
static PyObject *run(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!has_all(count, 3))
        return NULL;
    struct line *line = PyLong_AsVoidPtr(given[0]);
    struct ledger *ledger = PyLong_AsVoidPtr(given[1]);
    void *main = PyLong_AsVoidPtr(given[2]);
    *line->brief = (uint64_t)sheet_of(ledger, 0)->words;
    /* A GPU that has done the step before already waits for the host, which then has no time for
     * events. One that has not is busy: there nothing may come between the model's own kernels. */
    if (!is_done(sheet_of(ledger, 1)))
        return PyLong_FromLong(launch_aside(line, main));
    int status = launch_all(line, main);
    return PyLong_FromLong(status ? status : ON_MAIN);
}

/* note(ledger, step): write the brief of the last step once more; whether that could be done. */
static PyObject *note(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!has_all(count, 2))
        return NULL;
    struct ledger *ledger = PyLong_AsVoidPtr(given[0]);
    if (!has_room(ledger))
        Py_RETURN_FALSE;
    write_again(ledger, PyLong_AsLongLong(given[1]));
    Py_RETURN_TRUE;
}

/* goes_on(pace, req_ids, counts, starts): whether the batch keeps the pace. */
static PyObject *goes_on(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!has_all(count, 4))
        return NULL;
    return PyBool_FromLong(keeps(PyLong_AsVoidPtr(given[0]), given + 1));
}

static PyMethodDef functions[] = {FUNCTION(run), FUNCTION(note), FUNCTION(goes_on), {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "step", NULL, -1, functions};

PyMODINIT_FUNC PyInit_step(void)
{
    if (PyType_Ready(&around_type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddType(module, &steady_type) < 0)
        Py_CLEAR(module);
    return module;
}
