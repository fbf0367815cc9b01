/* Two threads race through a ring as ring/writer.py and ring/reader.py do, by shared_words.h.
 *
 * Prints how many records were delivered, lost and torn. HEAD_FIRST plants a bug: the head moves
 * before the record is written.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include "shared_words.h"

enum { SLOTS = 4, WORDS = 64, RECORDS = 200000 };

static struct {
    uint64_t head __attribute__((aligned(128)));
    uint64_t slots[SLOTS][WORDS] __attribute__((aligned(128)));
} ring;

static void write_record(uint64_t seq)
{
    uint64_t words[WORDS];
    for (int i = 0; i < WORDS; i++)
        words[i] = seq;
    memcpy(ring.slots[seq % SLOTS], words, sizeof words);
}

static void *write_all(void *unused)
{
    for (uint64_t seq = 0; seq < RECORDS; seq++) {
#ifdef HEAD_FIRST
        store_word(&ring.head, seq + 1);
        sched_yield();
        write_record(seq);
#else
        write_record(seq);
        store_word(&ring.head, seq + 1);
#endif
        if (seq % 64 == 0)
            sched_yield(); /* on one core, too, the reader has its turns */
    }
    return unused;
}

/* The oldest record that the writer cannot be overwriting. */
static uint64_t oldest(uint64_t head)
{
    return head < SLOTS ? 0 : head - SLOTS + 1;
}

static int is_torn(const uint64_t *words, uint64_t seq)
{
    int num_wrong = 0;
    for (int i = 0; i < WORDS; i++)
        num_wrong += words[i] != seq;
    return num_wrong > 0;
}

int main(void)
{
    uint64_t next = 0, delivered = 0, lost = 0, torn = 0, copy[WORDS];
    pthread_t writer;
    if (pthread_create(&writer, NULL, write_all, NULL))
        return 1;
    while (next < RECORDS) {
        uint64_t head = load_word(&ring.head);
        if (head == next) {
            sched_yield();
            continue;
        }
        if (next < oldest(head)) {
            lost += oldest(head) - next;
            next = oldest(head);
        }
        memcpy(copy, ring.slots[next % SLOTS], sizeof copy);
        if (next < oldest(load_word(&ring.head)))
            lost++;
        else if (is_torn(copy, next))
            torn++;
        else
            delivered++;
        next++;
    }
    pthread_join(writer, NULL);
    printf("%llu %llu %llu\n", (unsigned long long)delivered, (unsigned long long)lost,
           (unsigned long long)torn);
    return 0;
}
