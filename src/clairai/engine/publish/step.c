/* A step that is like the last one, without Python: its header, its launches, its wrapped methods.
 *
 * Runs in: the worker, with Python's lock held. What a step costs the host is not what it computes
 * but what it touches: between two steps the engine has used all of the caches, so every object and
 * every line of code comes from memory again. So Python hears only of steps with something new.
 * Python does the same for every step, and is the twin that tests compare this with.
 *
 * Compiled by whatever C compiler there is (step_extension.py). CUDA's headers are not needed: the
 * driver's functions come as addresses, with the types of cuda.h.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/ndarraytypes.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* The names are those of header_layout.py, which says what each of them is. */
struct header {
    int64_t HEADER_FIELDS;
};

struct counters {
    int64_t COUNTER_FIELDS;
};

/* Whether a function was given as many arguments as it reads; else the error is set. */
static int has_all(Py_ssize_t count, Py_ssize_t expected)
{
    if (count == expected)
        return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given, %zd are wanted", count, expected);
    return 0;
}

/* ---- Headers ---- */

/* The header of the last step but `back`; -1: the one that comes next. */
static struct header *header_at(const struct counters *counters, int64_t back)
{
    int64_t index = (counters->sent + NUM_HEADERS - 1 - back) % NUM_HEADERS;
    return (struct header *)((int64_t *)counters->headers + index * counters->header_words);
}

/* Whether the GPU has published the header. Acquire: the host writes to it after that. Pairs with
 * the last store of _publish_records() in publish_kernel.py. */
static int is_published(const struct header *header)
{
    return __atomic_load_n(&header->done, __ATOMIC_ACQUIRE) == header->number;
}

/* Whether the header of the last step can be written once more; Python waits for room. */
static int can_repeat(const struct counters *counters)
{
    return counters->shape && header_at(counters, 0)->shape == counters->shape
           && counters->published + counters->num_records <= counters->limit
           && is_published(header_at(counters, -1));
}

/* All that `next` does not say already, but for what differs from step to step. */
static void copy_shape(const struct counters *counters, const struct header *last,
                       struct header *next)
{
    const int64_t *from = (const int64_t *)last;
    int64_t *to = (int64_t *)next, head = sizeof(struct header) / 8;
    memcpy(to, from, offsetof(struct header, done));
    for (int64_t field = 0; field < NUM_REQUEST_FIELDS; field++) {
        int64_t at = head + field * counters->max_requests;
        memcpy(to + at, from + at, 8 * counters->num_requests);
    }
    memcpy(to + counters->tokens_at, from + counters->tokens_at, 4 * counters->num_tokens);
}

/* Write the header of the last step once more, for the next rows of its requests. */
static void write_repeated(struct counters *counters)
{
    const struct header *last = header_at(counters, 0);
    struct header *next = header_at(counters, -1);
    struct timespec now;
    if (next->shape != counters->shape)
        copy_shape(counters, last, next);
    clock_gettime(CLOCK_MONOTONIC, &now);
    next->first_seq = counters->published;
    next->step = ++counters->step;
    next->stamp_ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    /* Release: who sees the number sees the rest. Pairs with the first load of publish_in_graph()
     * in publish_kernel.py. */
    __atomic_store_n(&next->number, ++counters->sent, __ATOMIC_RELEASE);
    counters->published += counters->num_records;
}

/* repeat_header(counters): whether it could be done. */
static PyObject *repeat_header(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!has_all(count, 1))
        return NULL;
    struct counters *counters = PyLong_AsVoidPtr(given[0]);
    if (!can_repeat(counters))
        Py_RETURN_FALSE;
    write_repeated(counters);
    Py_RETURN_TRUE;
}

/* ---- Batches ---- */

static int are_same_requests(PyObject *req_ids, PyObject *known)
{
    if (!PyList_CheckExact(req_ids) || PyList_GET_SIZE(req_ids) != PyList_GET_SIZE(known))
        return 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(known); i++) {
        PyObject *one = PyList_GET_ITEM(req_ids, i), *other = PyList_GET_ITEM(known, i);
        if (one != other && (!PyUnicode_Check(one) || PyUnicode_Compare(one, other)))
            return 0;
    }
    return 1;
}

/* Whether an array has the same numbers as `known`, which is one of int32. */
static int is_same_array(PyObject *given, PyObject *known)
{
    PyArrayObject *one = (PyArrayObject *)given, *other = (PyArrayObject *)known;
    return Py_TYPE(given) == Py_TYPE(known) && PyArray_DESCR(one) == PyArray_DESCR(other)
           && PyArray_NDIM(one) == 1 && PyArray_DIM(one, 0) == PyArray_DIM(other, 0)
           && PyArray_CHKFLAGS(one, NPY_ARRAY_CARRAY_RO)
           && !memcmp(PyArray_DATA(one), PyArray_DATA(other), 4 * PyArray_DIM(other, 0));
}

/* Whether each request of `batch` goes on where it stopped, as in decode; then that is counted.
 * `batch`: its request ids, how many tokens each has, and from which position on. `known`: the same
 * of the last step, but with the positions at which it ended. */
static int continues(PyObject *known, PyObject *const *batch)
{
    PyObject *counts = PyTuple_GET_ITEM(known, 1), *ends = PyTuple_GET_ITEM(known, 2);
    if (!are_same_requests(batch[0], PyTuple_GET_ITEM(known, 0))
        || !is_same_array(batch[1], counts) || !is_same_array(batch[2], ends))
        return 0;
    const int32_t *count = PyArray_DATA((PyArrayObject *)counts);
    int32_t *end = PyArray_DATA((PyArrayObject *)ends);
    for (npy_intp i = 0; i < PyArray_DIM((PyArrayObject *)ends, 0); i++)
        end[i] += count[i];
    return 1;
}

/* is_same_batch(known, req_ids, counts, starts) */
static PyObject *is_same_batch(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    return has_all(count, 4) ? PyBool_FromLong(continues(given[0], given + 1)) : NULL;
}

/* Both in one: whether the step was like the last one; if not, nothing was done. */
static int repeats(struct counters *counters, PyObject *const *batch)
{
    PyObject *known = (PyObject *)counters->batch;
    if (!known || !can_repeat(counters) || !continues(known, batch))
        return 0;
    write_repeated(counters);
    return 1;
}

/* repeat_step(counters, req_ids, counts, starts) */
static PyObject *repeat_step(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!has_all(count, 4))
        return NULL;
    return PyBool_FromLong(repeats(PyLong_AsVoidPtr(given[0]), given + 1));
}

/* ---- Methods of the model runner that are wrapped ---- */

/* What a wrapped method holds: the list that is the `__self__` of a builtin, so that Python's
 * collector knows all of it. OWNER keeps what the counters point to. */
enum { ORIGINAL, OTHERWISE, THEN, NAMES, COUNTERS, OWNER, HELD };

static PyObject *get(PyObject *held, int which)
{
    return PyList_GET_ITEM(held, which);
}

/* Whether all attributes but the last are empty, and the last does not exist. */
static int has_nothing_new(PyObject *names, PyObject *object)
{
    Py_ssize_t last = PyTuple_GET_SIZE(names) - 1;
    int is_new = 0;
    for (Py_ssize_t i = 0; i < last && !is_new; i++) {
        PyObject *value = PyObject_GetAttr(object, PyTuple_GET_ITEM(names, i));
        is_new = value ? PyObject_IsTrue(value) : -1;
        Py_XDECREF(value);
    }
    if (is_new)
        return is_new < 0 ? -1 : 0;
    PyObject *own = PyObject_GenericGetDict(object, NULL);
    is_new = own ? PyDict_Contains(own, PyTuple_GET_ITEM(names, last)) : -1;
    Py_XDECREF(own);
    return is_new < 0 ? -1 : !is_new;
}

/* Call THEN, with the argument if there is one; whether it returned something true. */
static int call_then(PyObject *held, PyObject *argument)
{
    PyObject *result = PyObject_CallFunctionObjArgs(get(held, THEN), argument, NULL);
    int is_true = result ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(result);
    return is_true;
}

/* execute_model(scheduler_output, ...): ORIGINAL alone if the step has nothing new; if the batch
 * was another one after all, THEN ends the step. OTHERWISE for any other step. */
static PyObject *execute_model(PyObject *held, PyObject *const *given, Py_ssize_t count,
                               PyObject *keywords)
{
    struct counters *counters = PyLong_AsVoidPtr(get(held, COUNTERS));
    int is_alike = counters->is_repeating && !keywords && count;
    if (is_alike)
        is_alike = has_nothing_new(get(held, NAMES), given[0]);
    if (is_alike < 0)
        return NULL;
    if (!is_alike)
        return PyObject_Vectorcall(get(held, OTHERWISE), given, count, keywords);
    PyObject *result = PyObject_Vectorcall(get(held, ORIGINAL), given, count, NULL);
    if (result && counters->is_repeating)
        return result;
    int is_on = result ? call_then(held, NULL) : 0;
    if (is_on < 0)
        Py_CLEAR(result);
    counters->is_repeating = is_on > 0;
    return result;
}

/* Whether the batch was one like the last; its attributes NAMES are what repeat_step() takes. */
static int repeats_batch(PyObject *held, PyObject *batch)
{
    PyObject *parts[3], *names = get(held, NAMES);
    int count = 0, is_repeated = -1;
    for (; count < 3; count++) {
        parts[count] = PyObject_GetAttr(batch, PyTuple_GET_ITEM(names, count));
        if (!parts[count])
            break;
    }
    if (count == 3)
        is_repeated = repeats(PyLong_AsVoidPtr(get(held, COUNTERS)), parts);
    while (count)
        Py_DECREF(parts[--count]);
    return is_repeated;
}

/* prepare_inputs(...), which returns a batch: ORIGINAL, and THEN for a batch unlike the last. */
static PyObject *prepare_inputs(PyObject *held, PyObject *const *given, Py_ssize_t count,
                                PyObject *keywords)
{
    struct counters *counters = PyLong_AsVoidPtr(get(held, COUNTERS));
    PyObject *batch = PyObject_Vectorcall(get(held, ORIGINAL), given, count, keywords);
    if (!batch)
        return NULL;
    int is_repeated = counters->is_repeating ? repeats_batch(held, batch) : 0;
    if (is_repeated < 0 || (!is_repeated && call_then(held, batch) < 0))
        Py_CLEAR(batch);
    return batch;
}

#define FUNCTION(name, flags) {#name, (PyCFunction)(void (*)(void))name, flags, NULL}
static PyMethodDef execute_model_method = FUNCTION(execute_model, METH_FASTCALL | METH_KEYWORDS);
static PyMethodDef prepare_inputs_method = FUNCTION(prepare_inputs, METH_FASTCALL | METH_KEYWORDS);

static PyObject *wrap(PyMethodDef *method, PyObject *const *given, Py_ssize_t count)
{
    if (!has_all(count, HELD))
        return NULL;
    if (!PyTuple_CheckExact(given[NAMES]) || PyTuple_GET_SIZE(given[NAMES]) != 3)
        return PyErr_Format(PyExc_TypeError, "three names of attributes are wanted");
    PyObject *held = PyList_New(HELD);
    if (!held)
        return NULL;
    for (int which = 0; which < HELD; which++)
        PyList_SET_ITEM(held, which, Py_NewRef(given[which]));
    PyObject *made = PyCFunction_New(method, held);
    Py_DECREF(held);
    return made;
}

/* wrap_execute_model(original, otherwise, then, names, counters, owner) */
static PyObject *wrap_execute_model(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    return wrap(&execute_model_method, given, count);
}

/* wrap_prepare_inputs(original, otherwise, then, names, counters, owner) */
static PyObject *wrap_prepare_inputs(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    return wrap(&prepare_inputs_method, given, count);
}

/* ---- Launches, for steps that no graph publishes ---- */

enum { ON_MAIN = -1, ON_SIDE = 0 }; /* where a step's launches are; above: CUDA's error */

typedef int (*record_fn)(void *event, void *stream);
typedef int (*wait_fn)(void *stream, void *event, unsigned flags);
typedef int (*launch_fn)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                         void *stream, void **parameters, void **extra);

/* CLaunch and CLaunchList of launch_list.py */
struct launch {
    void *function;
    void **parameters;
    uint32_t grid[3];
    uint32_t threads;
    uint32_t shared;
};

struct launch_list {
    record_fn record;
    wait_fn wait;
    launch_fn launch;
    void *side, *forked, *joined; /* stream, events */
    struct launch *launches;
    uint64_t num_launches;
    uint64_t *header; /* the kernel's argument */
};

static int launch_all(const struct launch_list *list, void *stream)
{
    int status = 0;
    for (uint64_t i = 0; i < list->num_launches && !status; i++) {
        const struct launch *one = &list->launches[i];
        status = list->launch(one->function, one->grid[0], one->grid[1], one->grid[2],
                              one->threads, 1, 1, one->shared, stream, one->parameters, 0);
    }
    return status;
}

/* After what the stream `main` was given so far, beside what it is given next. */
static int launch_on_side(const struct launch_list *list, void *main)
{
    int status = list->record(list->forked, main);
    if (!status)
        status = list->wait(list->side, list->forked, 0);
    if (!status)
        status = launch_all(list, list->side);
    return status ? status : list->record(list->joined, list->side);
}

/* launch(list, counters, main): the launches for the header that was written last. */
static PyObject *launch(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!has_all(count, 3))
        return NULL;
    struct launch_list *list = PyLong_AsVoidPtr(given[0]);
    struct counters *counters = PyLong_AsVoidPtr(given[1]);
    void *main = PyLong_AsVoidPtr(given[2]);
    *list->header = (uint64_t)header_at(counters, 0);
    /* A GPU that has published the step before is idle and waits for the host: events would only
     * take the host's time. A busy GPU must find nothing between the model's own kernels. */
    if (!is_published(header_at(counters, 1)))
        return PyLong_FromLong(launch_on_side(list, main));
    int status = launch_all(list, main);
    return PyLong_FromLong(status ? status : ON_MAIN);
}

static PyMethodDef functions[] = {
    FUNCTION(repeat_header, METH_FASTCALL),
    FUNCTION(is_same_batch, METH_FASTCALL),
    FUNCTION(repeat_step, METH_FASTCALL),
    FUNCTION(wrap_execute_model, METH_FASTCALL),
    FUNCTION(wrap_prepare_inputs, METH_FASTCALL),
    FUNCTION(launch, METH_FASTCALL),
    {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "step", NULL, -1, functions};

PyMODINIT_FUNC PyInit_step(void)
{
    return PyModule_Create(&definition);
}
