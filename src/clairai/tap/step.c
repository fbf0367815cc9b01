/* Takes a step of the engine that is like the last one; gives it to the GPU in a few microseconds.
 *
 * Compiled by whatever C compiler there is (native.py), and called with Python's lock held. What a
 * step costs is not what it computes but what it touches: between two steps the engine has used all
 * of the caches, so that every object and every line of code comes from memory again. What is here
 * is what rows.py and commit.py do for any step, for the one kind that nearly all of them are.
 * No header of CUDA is needed: the driver's functions come as addresses, with the types of cuda.h.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/ndarraytypes.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { NUM_BRIEFS = 8, PLAN_FIELDS = 4 };
/* Words of a brief's head: see the top of commit_kernel.py. */
enum { SEQ_WORD = 2, STEP_WORD = 3, TIME_WORD = 8, NUMBER_WORD = 9, DONE_WORD = 15, BRIEF_HEAD = 16 };
enum { ON_MAIN = -1, ASIDE = 0 }; /* where a step's launches are; above: CUDA's error */

/* Pace of rows.py: who was in the last step, how many tokens each, and where they ended. */
struct pace {
    PyObject *req_ids;
    const int32_t *counts;
    int32_t *ends;
    int64_t num_requests;
    PyTypeObject *array; /* numpy's */
    PyArray_Descr *int32;
};

/* Sheet of ledger.py: one brief, which step of all it is for, and which form is written in it. */
struct sheet {
    int64_t *words;
    int64_t number, form;
};

/* Ledger of ledger.py */
struct ledger {
    int64_t sent, published;
    int64_t form, num_records, num_requests, num_tokens; /* of the last step */
    int64_t plan_words, tokens_at; /* of a field in every brief; where the tokens' requests are */
    struct sheet sheets[NUM_BRIEFS];
};

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

/* Whether a function was given as many arguments as it reads; else the error is set. */
static int has_all(Py_ssize_t count, Py_ssize_t expected)
{
    if (count == expected)
        return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given, %zd are wanted", count, expected);
    return 0;
}

/* Whether the GPU has published the step. Acquire: the brief is written after that. Pairs with the
 * last store of _publish() in commit_kernel.py. */
static int is_done(const struct sheet *sheet)
{
    return __atomic_load_n(&sheet->words[DONE_WORD], __ATOMIC_ACQUIRE) == sheet->number;
}

/* Have the form of the last step on this sheet too. */
static void copy_form(const struct ledger *ledger, const struct sheet *last, struct sheet *sheet)
{
    memcpy(sheet->words, last->words, 8 * DONE_WORD);
    for (int64_t field = 0; field < PLAN_FIELDS; field++) {
        int64_t at = BRIEF_HEAD + field * ledger->plan_words;
        memcpy(sheet->words + at, last->words + at, 8 * ledger->num_requests);
    }
    memcpy(sheet->words + ledger->tokens_at, last->words + ledger->tokens_at,
           4 * ledger->num_tokens);
    sheet->form = ledger->form;
}

static void write_head(struct ledger *ledger, struct sheet *sheet, int64_t step)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    sheet->number = ++ledger->sent;
    sheet->words[SEQ_WORD] = ledger->published;
    sheet->words[STEP_WORD] = step;
    sheet->words[TIME_WORD] = now.tv_sec * 1000000000LL + now.tv_nsec;
    sheet->words[NUMBER_WORD] = sheet->number;
    ledger->published += ledger->num_records;
}

/* The sheet of the last step but `back`. */
static struct sheet *sheet_of(struct ledger *ledger, int64_t back)
{
    return &ledger->sheets[(ledger->sent + NUM_BRIEFS - 1 - back) % NUM_BRIEFS];
}

/* note(ledger, step): write the brief of the last step once more, with the next rows of its requests;
 * whether that could be done. */
static PyObject *note(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!has_all(count, 2))
        return NULL;
    struct ledger *ledger = PyLong_AsVoidPtr(given[0]);
    struct sheet *last = sheet_of(ledger, 0), *sheet = sheet_of(ledger, -1);
    if (last->form != ledger->form || !is_done(sheet))
        Py_RETURN_FALSE;
    if (sheet->form != ledger->form)
        copy_form(ledger, last, sheet);
    write_head(ledger, sheet, PyLong_AsLongLong(given[1]));
    Py_RETURN_TRUE;
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

static int are_same(PyObject *req_ids, const struct pace *pace)
{
    if (!PyList_CheckExact(req_ids) || PyList_GET_SIZE(req_ids) != pace->num_requests)
        return 0;
    for (Py_ssize_t i = 0; i < pace->num_requests; i++) {
        PyObject *one = PyList_GET_ITEM(req_ids, i), *other = PyList_GET_ITEM(pace->req_ids, i);
        if (one != other && (!PyUnicode_Check(one) || PyUnicode_Compare(one, other)))
            return 0;
    }
    return 1;
}

/* Whether an array of int32 has just these numbers. */
static int has(const struct pace *pace, PyObject *given, const int32_t *numbers)
{
    PyArrayObject *array = (PyArrayObject *)given;
    return Py_TYPE(given) == pace->array && PyArray_DESCR(array) == pace->int32
           && PyArray_NDIM(array) == 1 && PyArray_DIM(array, 0) == pace->num_requests
           && PyArray_CHKFLAGS(array, NPY_ARRAY_CARRAY_RO)
           && !memcmp(PyArray_DATA(array), numbers, 4 * pace->num_requests);
}

/* goes_on(pace, req_ids, counts, starts): whether each request goes on where it stopped, as decode
 * does; then that is counted. */
static PyObject *goes_on(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!has_all(count, 4))
        return NULL;
    struct pace *pace = PyLong_AsVoidPtr(given[0]);
    if (!are_same(given[1], pace) || !has(pace, given[2], pace->counts)
        || !has(pace, given[3], pace->ends))
        Py_RETURN_FALSE;
    for (int64_t i = 0; i < pace->num_requests; i++)
        pace->ends[i] += pace->counts[i];
    Py_RETURN_TRUE;
}

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef functions[] = {FUNCTION(run), FUNCTION(note), FUNCTION(goes_on), {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "step", NULL, -1, functions};

PyMODINIT_FUNC PyInit_step(void)
{
    return PyModule_Create(&definition);
}
