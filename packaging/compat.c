/* What a library for an older glibc takes along, in the place of symbols that this glibc has and that one has not. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#define HIDDEN __attribute__((visibility("hidden")))

/* glibc 2.32: libstdc++ counts references without atomics while it is true. */
HIDDEN char __libc_single_threaded = 0;

/* glibc 2.30. Where it is lacking, the deadline is taken to the other clock; callers look at their own clock afterwards. */
typedef int Clockwait(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);

HIDDEN int pthread_cond_clockwait(pthread_cond_t* cond, pthread_mutex_t* mutex, clockid_t clock,
                                  const struct timespec* deadline) {
  Clockwait* found = (Clockwait*)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
  if (found) return found(cond, mutex, clock, deadline);
  struct timespec here, there;
  clock_gettime(clock, &here);
  clock_gettime(CLOCK_REALTIME, &there);
  there.tv_sec += deadline->tv_sec - here.tv_sec;
  there.tv_nsec += deadline->tv_nsec - here.tv_nsec;
  if (there.tv_nsec < 0) {
    there.tv_nsec += 1000000000;
    there.tv_sec -= 1;
  } else if (there.tv_nsec >= 1000000000) {
    there.tv_nsec -= 1000000000;
    there.tv_sec += 1;
  }
  return pthread_cond_timedwait(cond, mutex, &there);
}
