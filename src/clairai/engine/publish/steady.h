/* Takes the methods of a runner that are wrapped; gives them, without Python for nearly all steps.
 *
 * Called with Python's lock held. What a step costs is not what it computes but what it touches:
 * between two steps the engine has used all of the caches, so that every object and every line of
 * code comes from memory again. So Python hears of a step when there is something to do in it.
 */
#include "alike.h"
#include <stddef.h>
#include <structmember.h>

/* Steady of steady.py: whether steps repeat, and what then repeats. */
struct steady {
    PyObject_HEAD
    char is_on;
    struct pace *pace;
    struct ledger *ledger;
    PyObject *held; /* whose pace it is */
};

/* goes_on() and note() of step.c in one; whether they could be done, else neither was. */
static int repeats(struct steady *self, PyObject *const *batch)
{
    struct ledger *ledger = self->ledger;
    if (!self->held || !has_room(ledger) || !keeps(self->pace, batch))
        return 0;
    write_again(ledger, ledger->step + 1);
    return 1;
}

static PyObject *again(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    return has_all(count, 3) ? PyBool_FromLong(repeats((struct steady *)self, given)) : NULL;
}

/* repeat(pace, ledger, held) */
static PyObject *repeat(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    struct steady *self = (struct steady *)object;
    if (!has_all(count, 3))
        return NULL;
    self->pace = PyLong_AsVoidPtr(given[0]);
    self->ledger = PyLong_AsVoidPtr(given[1]);
    Py_INCREF(given[2]);
    Py_XSETREF(self->held, given[2]);
    Py_RETURN_TRUE;
}

/* A method of the runner that is wrapped: called in its place. */
struct around {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *wrapped, *otherwise, *then;
    PyObject *names; /* of attributes */
    struct steady *steady;
};

/* Whether none of the attributes but the last says anything, and the last is not there. */
static int is_quiet(PyObject *names, PyObject *object)
{
    Py_ssize_t last = PyTuple_GET_SIZE(names) - 1;
    int is_said = 0;
    for (Py_ssize_t i = 0; i < last && !is_said; i++) {
        PyObject *value = PyObject_GetAttr(object, PyTuple_GET_ITEM(names, i));
        is_said = value ? PyObject_IsTrue(value) : -1;
        Py_XDECREF(value);
    }
    if (is_said)
        return is_said < 0 ? -1 : 0;
    PyObject *own = PyObject_GenericGetDict(object, NULL);
    is_said = own ? PyDict_Contains(own, PyTuple_GET_ITEM(names, last)) : -1;
    Py_XDECREF(own);
    return is_said < 0 ? -1 : !is_said;
}

/* Whether what `then` gives is true; it is called with the argument, if there is one. */
static int follows(struct around *self, PyObject *argument)
{
    PyObject *given = PyObject_CallFunctionObjArgs(self->then, argument, NULL);
    int is_true = given ? PyObject_IsTrue(given) : -1;
    Py_XDECREF(given);
    return is_true;
}

/* execute_model(scheduled, ...) of runner.py */
static PyObject *step(PyObject *object, PyObject *const *given, size_t count, PyObject *keywords)
{
    struct around *self = (struct around *)object;
    int is_alike = self->steady->is_on && !keywords && PyVectorcall_NARGS(count);
    if (is_alike)
        is_alike = is_quiet(self->names, given[0]);
    if (is_alike < 0)
        return NULL;
    if (!is_alike)
        return PyObject_Vectorcall(self->otherwise, given, count, keywords);
    PyObject *result = PyObject_Vectorcall(self->wrapped, given, count, NULL);
    if (result && self->steady->is_on)
        return result;
    int is_on = result ? follows(self, NULL) : 0;
    if (is_on < 0)
        Py_CLEAR(result);
    self->steady->is_on = is_on > 0;
    return result;
}

/* Whether the batch could be noted as one that is like the last. */
static int keeps_on(struct around *self, PyObject *batch)
{
    PyObject *parts[3];
    int count = 0, is_noted = -1;
    for (; count < 3; count++) {
        parts[count] = PyObject_GetAttr(batch, PyTuple_GET_ITEM(self->names, count));
        if (!parts[count])
            break;
    }
    if (count == 3)
        is_noted = repeats(self->steady, parts);
    while (count)
        Py_DECREF(parts[--count]);
    return is_noted;
}

/* prepare_inputs(...) of runner.py, which gives a batch */
static PyObject *lay(PyObject *object, PyObject *const *given, size_t count, PyObject *keywords)
{
    struct around *self = (struct around *)object;
    PyObject *batch = PyObject_Vectorcall(self->wrapped, given, count, keywords);
    if (!batch)
        return NULL;
    int is_noted = self->steady->is_on ? keeps_on(self, batch) : 0;
    if (is_noted < 0 || (!is_noted && follows(self, batch) < 0))
        Py_CLEAR(batch);
    return batch;
}

static int steady_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((struct steady *)object)->held);
    return 0;
}

static int steady_clear(PyObject *object)
{
    Py_CLEAR(((struct steady *)object)->held);
    return 0;
}

static int around_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct around *self = (struct around *)object;
    Py_VISIT(self->wrapped);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->then);
    Py_VISIT(self->names);
    Py_VISIT(self->steady);
    return 0;
}

static int around_clear(PyObject *object)
{
    struct around *self = (struct around *)object;
    Py_CLEAR(self->wrapped);
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->then);
    Py_CLEAR(self->names);
    Py_CLEAR(self->steady);
    return 0;
}

static void dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    Py_TYPE(object)->tp_clear(object);
    Py_TYPE(object)->tp_free(object);
}

/* For the benches: what is wrapped, and who is told of other steps. */
static PyMemberDef around_members[] = {
    {"__wrapped__", T_OBJECT_EX, offsetof(struct around, wrapped), 0, NULL},
    {"otherwise", T_OBJECT_EX, offsetof(struct around, otherwise), READONLY, NULL},
    {0}};

static PyTypeObject around_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "steady.Around",
    .tp_basicsize = sizeof(struct around),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(struct around, call),
    .tp_call = PyVectorcall_Call,
    .tp_traverse = around_traverse,
    .tp_clear = around_clear,
    .tp_dealloc = dealloc,
    .tp_members = around_members,
};

static PyObject *new_around(PyObject *steady, vectorcallfunc call, PyObject *const *given)
{
    if (!PyTuple_CheckExact(given[3]) || PyTuple_GET_SIZE(given[3]) != 3)
        return PyErr_Format(PyExc_TypeError, "three names of attributes are wanted");
    struct around *made = PyObject_GC_New(struct around, &around_type);
    if (!made)
        return NULL;
    made->call = call;
    made->wrapped = Py_NewRef(given[0]);
    made->otherwise = Py_NewRef(given[1]);
    made->then = Py_NewRef(given[2]);
    made->names = Py_NewRef(given[3]);
    made->steady = (struct steady *)Py_NewRef(steady);
    PyObject_GC_Track(made);
    return (PyObject *)made;
}

/* stepping(wrapped, otherwise, then, names) */
static PyObject *stepping(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    return has_all(count, 4) ? new_around(self, step, given) : NULL;
}

/* laying(wrapped, otherwise, then, names) */
static PyObject *laying(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    return has_all(count, 4) ? new_around(self, lay, given) : NULL;
}

static PyMethodDef steady_methods[] = {
    FUNCTION(again), FUNCTION(repeat), FUNCTION(stepping), FUNCTION(laying), {0}};
static PyMemberDef steady_members[] = {
    {"is_on", T_BOOL, offsetof(struct steady, is_on), 0, NULL}, {0}};

static PyTypeObject steady_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "steady.Steady",
    .tp_basicsize = sizeof(struct steady),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_traverse = steady_traverse,
    .tp_clear = steady_clear,
    .tp_dealloc = dealloc,
    .tp_methods = steady_methods,
    .tp_members = steady_members,
};
