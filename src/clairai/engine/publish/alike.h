/* Takes a pace and a ledger; gives whether a batch keeps the one, and its brief in the other.
 *
 * What rows.py and commit.py do for any step, for the one kind that nearly all of them are: like the
 * last one.
 */
#include "ledger.h"
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/ndarraytypes.h>
#include <string.h>
#include <time.h>

/* Pace of rows.py: who was in the last step, how many tokens each, and where they ended. */
struct pace {
    PyObject *req_ids;
    const int32_t *counts;
    int32_t *ends;
    int64_t num_requests;
    PyTypeObject *array; /* numpy's */
    PyArray_Descr *int32;
};

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
    ledger->step = step;
    sheet->words[SEQ_WORD] = ledger->published;
    sheet->words[STEP_WORD] = step;
    sheet->words[TIME_WORD] = now.tv_sec * 1000000000LL + now.tv_nsec;
    sheet->words[NUMBER_WORD] = sheet->number;
    ledger->published += ledger->num_records;
}

/* Whether the brief of the last step can be written once more. */
static int has_room(struct ledger *ledger)
{
    return sheet_of(ledger, 0)->form == ledger->form && is_done(sheet_of(ledger, -1));
}

/* Write it, with the next rows of its requests. */
static void write_again(struct ledger *ledger, int64_t step)
{
    struct sheet *last = sheet_of(ledger, 0), *sheet = sheet_of(ledger, -1);
    if (sheet->form != ledger->form)
        copy_form(ledger, last, sheet);
    write_head(ledger, sheet, step);
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

/* Whether each request of `batch` goes on where it stopped, as decode does; then that is counted.
 * `batch`: who is in it, how many tokens each, and from where. */
static int keeps(struct pace *pace, PyObject *const *batch)
{
    if (!are_same(batch[0], pace) || !has(pace, batch[1], pace->counts)
        || !has(pace, batch[2], pace->ends))
        return 0;
    for (int64_t i = 0; i < pace->num_requests; i++)
        pace->ends[i] += pace->counts[i];
    return 1;
}
