/* A disk that is slow once: the first fsync of each process after the file $SLOW_WHEN is there takes $SLOW_SECONDS. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

static int is_over = 0;

int fsync(int file) {
    static int (*real)(int) = NULL;
    const char *when = getenv("SLOW_WHEN"), *seconds = getenv("SLOW_SECONDS");
    if (real == NULL) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    if (!is_over && when != NULL && seconds != NULL && access(when, F_OK) == 0) {
        is_over = 1;
        for (unsigned left = (unsigned)atoi(seconds); left > 0;) left = sleep(left);
    }
    return real(file);
}
