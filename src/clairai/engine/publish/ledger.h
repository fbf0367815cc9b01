/* Takes the ledger of ledger.py; gives its sheets, to what is compiled here. */
#ifndef CLAIRAI_LEDGER_H
#define CLAIRAI_LEDGER_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum { NUM_BRIEFS = 8, PLAN_FIELDS = 4 };
/* Words of a brief's head: see the top of commit_kernel.py. */
enum { SEQ_WORD = 2, STEP_WORD = 3, TIME_WORD = 8, NUMBER_WORD = 9, DONE_WORD = 15 };
enum { BRIEF_HEAD = 16 };

/* Sheet of ledger.py: one brief, which step of all it is for, and which form is written in it. */
struct sheet {
    int64_t *words;
    int64_t number, form;
};

/* Ledger of ledger.py */
struct ledger {
    int64_t sent, published, step;
    int64_t form, num_records, num_requests, num_tokens; /* of the last step */
    int64_t plan_words, tokens_at; /* of a field in every brief; where the tokens' requests are */
    struct sheet sheets[NUM_BRIEFS];
};

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

/* The sheet of the last step but `back`. */
static struct sheet *sheet_of(struct ledger *ledger, int64_t back)
{
    return &ledger->sheets[(ledger->sent + NUM_BRIEFS - 1 - back) % NUM_BRIEFS];
}

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
#endif
