/* A load and a store of one word with the order that x86-64 gives to every load and store.
 *
 * A release store and an acquire load alone do not do. They order what comes before the store and
 * what comes after the load. A ring that is written again and again needs the other two as well: the
 * head is visible before a byte of the next record, and is loaded after the last byte was copied.
 * docs/decisions/0049-words-in-shared-memory.md lists who relies on what.
 */
#include <stdint.h>

/* Loads before it have completed; loads and stores after it come later. Pairs with store_word(). */
static inline uint64_t load_word(const uint64_t *word)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* Loads and stores before it come earlier; stores after it come later. Pairs with load_word(). */
static inline void store_word(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_RELEASE);
}
