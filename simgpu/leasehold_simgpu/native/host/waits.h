/* Sleeps, and waits for a change of a word that processes share. */
#ifndef SIMGPU_WAITS_H
#define SIMGPU_WAITS_H

#include <stdatomic.h>
#include <stdint.h>

/* Sleeps for the whole time, also if a signal arrives. */
void simgpu_sleep_us(uint64_t microseconds);

/* Sleeps until the word is no longer `value`, but at most so long. May return early. */
void simgpu_wait_word(_Atomic uint32_t *word, uint32_t value, unsigned milliseconds);
void simgpu_wake_word(_Atomic uint32_t *word);

#endif
