/* Words of a buffer, loaded and stored in order (shared_words.h), for shared_words.py.
 *
 * The buffer is asked for at each call: whoever has released it gets an error, not another's memory.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "shared_words.h"

/* The address of a word; NULL, with the error set, if the buffer has no such word. */
static uint64_t *find_word(const Py_buffer *buffer, Py_ssize_t index)
{
    if (index < 0 || index >= buffer->len / 8)
        PyErr_Format(PyExc_IndexError, "word %zd of %zd", index, buffer->len / 8);
    else if ((uintptr_t)buffer->buf % 8)
        PyErr_SetString(PyExc_ValueError, "the words are not aligned");
    else
        return (uint64_t *)buffer->buf + index;
    return NULL;
}

/* load(buffer, index) */
static PyObject *load(PyObject *module, PyObject *given)
{
    Py_buffer buffer;
    Py_ssize_t index;
    PyObject *value = NULL;
    if (!PyArg_ParseTuple(given, "y*n", &buffer, &index))
        return NULL;
    const uint64_t *word = find_word(&buffer, index);
    if (word)
        value = PyLong_FromUnsignedLongLong(load_word(word));
    PyBuffer_Release(&buffer);
    return value;
}

/* store(buffer, index, value) */
static PyObject *store(PyObject *module, PyObject *given)
{
    Py_buffer buffer;
    Py_ssize_t index;
    PyObject *number;
    if (!PyArg_ParseTuple(given, "w*nO!", &buffer, &index, &PyLong_Type, &number))
        return NULL;
    uint64_t *word = find_word(&buffer, index);
    if (word) {
        unsigned long long value = PyLong_AsUnsignedLongLong(number);
        if (!PyErr_Occurred())
            store_word(word, value);
    }
    PyBuffer_Release(&buffer);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"load", load, METH_VARARGS, NULL}, {"store", store, METH_VARARGS, NULL}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "shared_words", NULL, -1, functions};

PyMODINIT_FUNC PyInit_shared_words(void)
{
    return PyModule_Create(&definition);
}
