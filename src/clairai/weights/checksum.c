/* The checksum of checksum.py at the speed of memory: of bytes, or of a copy made in the same pass.
 *
 * Compiled by the machine's own C compiler (local/c_extension.py); `_sum_words` of checksum.py is the
 * reference. Python's lock is released meanwhile, so that engine steps go on.
 */
#pragma GCC optimize("O3") /* vectorize the loops */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

static const uint64_t PLACE = 0x9E3779B97F4A7C15u, MIX = 0xFF51AFD7ED558CCDu;
enum { WORD_BYTES = 8, BLOCK_BYTES = 1 << 12 }; /* a block stays in the L1 cache */

static uint64_t word_at(const unsigned char *bytes)
{
    uint64_t word = 0; /* in memory order: little-endian on every machine that vLLM serves on */
    memcpy(&word, bytes, WORD_BYTES);
    return word;
}

static uint64_t mix(uint64_t word, uint64_t place)
{
    uint64_t x = word + place;
    x ^= x >> 33;
    x *= MIX;
    return x ^ x >> 29;
}

/* Sum whole words; `first` is the position of the first one. */
static inline __attribute__((always_inline)) uint64_t sum_words(const unsigned char *bytes,
                                                               size_t words, uint64_t first)
{
    uint64_t total = 0;
    for (size_t at = 0; at < words; at++)
        total += mix(word_at(bytes + at * WORD_BYTES), (first + at) * PLACE);
    return total;
}

static uint64_t sum_plain(const unsigned char *bytes, size_t words, uint64_t first)
{
    return sum_words(bytes, words, first);
}

#ifdef __x86_64__ /* eight words at once, where the processor can multiply them */
__attribute__((target("avx512f,avx512dq,avx512vl"))) static uint64_t
sum_wide(const unsigned char *bytes, size_t words, uint64_t first)
{
    return sum_words(bytes, words, first);
}

typedef uint64_t eight __attribute__((vector_size(8 * WORD_BYTES)));

/* Copy and sum words in groups of eight; `first` is the position of the first one. */
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

/* Sum bytes; a last partial word is padded with zeros. */
static uint64_t sum(const unsigned char *bytes, size_t nbytes, uint64_t first)
{
    size_t words = nbytes / WORD_BYTES, left = nbytes % WORD_BYTES;
    uint64_t total = (is_wide() ? sum_wide : sum_plain)(bytes, words, first);
    if (left) {
        unsigned char rest[WORD_BYTES] = {0};
        memcpy(rest, bytes + words * WORD_BYTES, left);
        total += mix(word_at(rest), (first + words) * PLACE);
    }
    return total;
}

/* checksum(source): the sum of all its words. */
static PyObject *checksum(PyObject *module, PyObject *given)
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

/* The sum is that of the copy, even if somebody writes to the source meanwhile. */
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

/* copy_and_checksum(target, source): copy all bytes; the sum of the copy. */
static PyObject *copy_and_checksum(PyObject *module, PyObject *given)
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
    {"checksum", checksum, METH_O, NULL},
    {"copy_and_checksum", copy_and_checksum, METH_VARARGS, NULL},
    {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "checksum", NULL, -1, functions};

PyMODINIT_FUNC PyInit_checksum(void)
{
    return PyModule_Create(&definition);
}
