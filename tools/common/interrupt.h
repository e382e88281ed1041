/* Signals as a request: the first one is noted and left for the work to see between two steps.
 *
 * A second SIGINT or SIGTERM ends the process at once. SIGHUP and SIGPIPE never do: a terminal that closes sends the
 * first more than once, and every line on the closed pipe the second. Where they were ignored at the start (nohup),
 * they stay so. */
#ifndef HALFSTEP_INTERRUPT_H
#define HALFSTEP_INTERRUPT_H

void interrupt_install(void);
/* The signal that has arrived, or 0. The exit status it asks for is 128 + the signal. */
int interrupt_pending(void);
/* Between the two, signals end the process at once, and one that has been noted does so now: for a call that may wait
 * for ever while there is nothing to save. Without interrupt_install() they do nothing. */
void interrupt_pause(void);
void interrupt_resume(void);

#endif
