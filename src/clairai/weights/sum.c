/* Takes bytes; gives the sum that checksum.py defines, at the speed of the memory they lie in; or a
 * copy of them and the sum of that copy, in no more time than the copy.
 *
 * Compiled by whatever C compiler there is (local/c_extension.py); the twin is `_sum` of checksum.py. Python's
 * lock is let go meanwhile: steps of the engine go on while a buffer is read.
 */
#pragma GCC optimize("O3") /* loops as wide as the processor's registers */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

static const uint64_t PLACE = 0x9E3779B97F4A7C15u, MIX = 0xFF51AFD7ED558CCDu;
enum { WORD_BYTES = 8, BLOCK_BYTES = 1 << 12 }; /* a block stays in the nearest cache */

static uint64_t word_at(const unsigned char *bytes)
{
    uint64_t word = 0; /* as it lies in memory: on all machines that vLLM serves on, little-endian */
    memcpy(&word, bytes, WORD_BYTES);
    return word;
}

static uint64_t mixed(uint64_t word, uint64_t place)
{
    uint64_t x = word + place;
    x ^= x >> 33;
    x *= MIX;
    return x ^ x >> 29;
}

/* Of the words from number `first` on. */
static inline __attribute__((always_inline)) uint64_t sum_words(const unsigned char *bytes,
                                                               size_t words, uint64_t first)
{
    uint64_t total = 0;
    for (size_t at = 0; at < words; at++)
        total += mixed(word_at(bytes + at * WORD_BYTES), (first + at) * PLACE);
    return total;
}

static uint64_t sum_plain(const unsigned char *bytes, size_t words, uint64_t first)
{
    return sum_words(bytes, words, first);
}

#ifdef __x86_64__ /* eight words at once, where the processor can multiply so many */
__attribute__((target("avx512f,avx512dq,avx512vl"))) static uint64_t
sum_wide(const unsigned char *bytes, size_t words, uint64_t first)
{
    return sum_words(bytes, words, first);
}

typedef uint64_t eight __attribute__((vector_size(8 * WORD_BYTES)));

/* Of the words of whole eights, from number `first` on, copied on the way. */
__attribute__((target("avx512f,avx512dq,avx512vl"))) static uint64_t
copy_wide(unsigned char *target, const unsigned char *source, size_t eights, uint64_t first)
{
    eight total = {0}, place = {0, 1, 2, 3, 4, 5, 6, 7};
    place = (place + first) * PLACE;
    for (size_t at = 0; at < eights * sizeof(eight); at += sizeof(eight)) {
        eight x;
        memcpy(&x, source + at, sizeof x);
        __asm__ volatile("" : "+v"(x)); /* read once: what is stored is what is summed */
        memcpy(target + at, &x, sizeof x);
        x += place;
        x ^= x >> 33;
        x *= MIX;
        total += x ^ x >> 29;
        place += 8 * PLACE;
    }
    return total[0] + total[1] + total[2] + total[3] + total[4] + total[5] + total[6] + total[7];
}

static int is_wide(void)
{
    return __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
#define sum_wide sum_plain
#define copy_wide(target, source, eights, first) 0
#define is_wide() 0
#endif

/* As `sum_words`; less than a word at the end counts as if zeros followed. */
static uint64_t sum(const unsigned char *bytes, size_t nbytes, uint64_t first)
{
    size_t words = nbytes / WORD_BYTES, left = nbytes % WORD_BYTES;
    uint64_t total = (is_wide() ? sum_wide : sum_plain)(bytes, words, first);
    if (left) {
        unsigned char rest[WORD_BYTES] = {0};
        memcpy(rest, bytes + words * WORD_BYTES, left);
        total += mixed(word_at(rest), (first + words) * PLACE);
    }
    return total;
}

/* summed(source): the sum of all its words. */
static PyObject *summed(PyObject *module, PyObject *given)
{
    Py_buffer source;
    uint64_t total;
    if (PyObject_GetBuffer(given, &source, PyBUF_SIMPLE))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    total = sum(source.buf, source.len, 0);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&source);
    return PyLong_FromUnsignedLongLong(total);
}

/* What is summed is the copy: whoever writes to the source meanwhile cannot part the two. */
static uint64_t copy_and_sum(unsigned char *target, const unsigned char *source, size_t nbytes)
{
    size_t eights = is_wide() ? nbytes / (8 * WORD_BYTES) : 0;
    uint64_t total = eights ? copy_wide(target, source, eights, 0) : 0;
    for (size_t at = eights * 8 * WORD_BYTES; at < nbytes; at += BLOCK_BYTES) {
        size_t part = nbytes - at < BLOCK_BYTES ? nbytes - at : BLOCK_BYTES;
        memcpy(target + at, source + at, part);
        total += sum(target + at, part, at / WORD_BYTES);
    }
    return total;
}

/* copied(target, source): all of it, into as many bytes; the sum of the copy. */
static PyObject *copied(PyObject *module, PyObject *given)
{
    Py_buffer target, source;
    uint64_t total = 0;
    if (!PyArg_ParseTuple(given, "w*y*", &target, &source))
        return NULL;
    int is_same = target.len == source.len;
    if (is_same) {
        Py_BEGIN_ALLOW_THREADS
        total = copy_and_sum(target.buf, source.buf, source.len);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_Format(PyExc_ValueError, "%zd bytes do not fill %zd", source.len, target.len);
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    return is_same ? PyLong_FromUnsignedLongLong(total) : NULL;
}

static PyMethodDef functions[] = {
    {"summed", summed, METH_O, NULL}, {"copied", copied, METH_VARARGS, NULL}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "sum", NULL, -1, functions};

PyMODINIT_FUNC PyInit_sum(void)
{
    return PyModule_Create(&definition);
}
