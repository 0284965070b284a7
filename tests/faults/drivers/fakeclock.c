/* Clocks of a process that tests set: preload it, and name a file of four doubles in ZT_CLOCK_FILE.
 *
 *   origin  CLOCK_MONOTONIC (s) when the file was made
 *   rate    seconds that pass on every clock of this process in one real second
 *   jump    seconds by which all its clocks are ahead, beyond the rate
 *   wall    seconds by which its wall clock alone is ahead
 *
 * The file is mapped, so jumps take effect at once. Waits are converted, and look again every 50 ms, so that a jump ends
 * one that has become due, as it does after a real suspend. Sleeps with an absolute time, timers of descriptors and
 * select with more than a time are left alone: neither CPython's waits nor libzmq use them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct clocks { double origin, rate, jump, wall; };
static const volatile struct clocks *clocks;
static int (*real_gettime)(clockid_t, struct timespec *);

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define SLICE 0.05

__attribute__((constructor)) static void begin(void) {
    real_gettime = REAL(clock_gettime);
    const char *path = getenv("ZT_CLOCK_FILE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof(struct clocks), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED) clocks = at;
}

static double seconds(const struct timespec *t) { return (double)t->tv_sec + t->tv_nsec * 1e-9; }

static struct timespec spec(double s) {
    if (s < 0) s = 0;
    struct timespec t = {(time_t)s, (long)((s - floor(s)) * 1e9)};
    return t;
}

static double real_now(clockid_t id) {
    struct timespec t;
    real_gettime(id, &t);
    return seconds(&t);
}

/* How far this process's clocks are ahead of the real ones, without the step of the wall clock. */
static double ahead(void) {
    double mono = real_now(CLOCK_MONOTONIC);
    return (mono - clocks->origin) * (clocks->rate - 1.0) + clocks->jump;
}

static int is_wall(clockid_t id) { return id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE; }

static int is_mono(clockid_t id) {
    return id == CLOCK_MONOTONIC || id == CLOCK_MONOTONIC_COARSE || id == CLOCK_MONOTONIC_RAW || id == CLOCK_BOOTTIME;
}

static double fake_now(clockid_t id) { return real_now(id) + ahead() + (is_wall(id) ? clocks->wall : 0.0); }

static void add_ns(struct timespec *t, double s) {
    long long ns = (long long)t->tv_sec * 1000000000LL + t->tv_nsec + (long long)(s * 1e9);
    t->tv_sec = ns / 1000000000LL;
    t->tv_nsec = ns % 1000000000LL;
}

int clock_gettime(clockid_t id, struct timespec *t) {
    if (!real_gettime) real_gettime = REAL(clock_gettime);
    int code = real_gettime(id, t);
    if (code == 0 && clocks && (is_wall(id) || is_mono(id))) add_ns(t, ahead() + (is_wall(id) ? clocks->wall : 0.0));
    return code;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

/* Real seconds to wait now for a wait that ends at `until` on this process's monotonic clock. */
static double slice(double until) {
    double left = (until - fake_now(CLOCK_MONOTONIC)) / clocks->rate;
    return left < 0 ? 0 : left > SLICE ? SLICE : left;
}

static double end_of(double s) { return fake_now(CLOCK_MONOTONIC) + s; }
static int over(double until) { return fake_now(CLOCK_MONOTONIC) >= until; }

int poll(struct pollfd *fds, nfds_t count, int ms) {
    __typeof__(&poll) real = REAL(poll);
    if (!clocks || ms <= 0) return real(fds, count, ms);
    double until = end_of(ms * 1e-3);
    for (;;) {
        int code = real(fds, count, (int)ceil(slice(until) * 1e3));
        if (code != 0 || over(until)) return code;
    }
}

int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *t, const sigset_t *mask) {
    __typeof__(&ppoll) real = REAL(ppoll);
    if (!clocks || !t) return real(fds, count, t, mask);
    double until = end_of(seconds(t));
    for (;;) {
        struct timespec part = spec(slice(until));
        int code = real(fds, count, &part, mask);
        if (code != 0 || over(until)) return code;
    }
}

int epoll_wait(int fd, struct epoll_event *events, int most, int ms) {
    __typeof__(&epoll_wait) real = REAL(epoll_wait);
    if (!clocks || ms <= 0) return real(fd, events, most, ms);
    double until = end_of(ms * 1e-3);
    for (;;) {
        int code = real(fd, events, most, (int)ceil(slice(until) * 1e3));
        if (code != 0 || over(until)) return code;
    }
}

int select(int count, fd_set *in, fd_set *out, fd_set *bad, struct timeval *t) {
    __typeof__(&select) real = REAL(select);
    if (!clocks || !t) return real(count, in, out, bad, t);
    double until = end_of((double)t->tv_sec + t->tv_usec * 1e-6);
    fd_set kept[3];
    fd_set *sets[3] = {in, out, bad};
    for (int i = 0; i < 3; i++)
        if (sets[i]) kept[i] = *sets[i];
    for (;;) {
        struct timespec part = spec(slice(until));
        struct timeval brief = {part.tv_sec, part.tv_nsec / 1000 + 1};
        int code = real(count, in, out, bad, &brief);
        if (code != 0 || over(until)) return code;
        for (int i = 0; i < 3; i++)
            if (sets[i]) *sets[i] = kept[i];
    }
}

static int nap(double until) {
    __typeof__(&nanosleep) real = REAL(nanosleep);
    while (!over(until)) {
        struct timespec part = spec(slice(until));
        if (real(&part, NULL) != 0) return -1;
    }
    return 0;
}

int nanosleep(const struct timespec *t, struct timespec *left) {
    return clocks ? nap(end_of(seconds(t))) : REAL(nanosleep)(t, left);
}

int usleep(useconds_t us) { return clocks ? nap(end_of(us * 1e-6)) : REAL(usleep)(us); }

int clock_nanosleep(clockid_t id, int flags, const struct timespec *t, struct timespec *left) {
    if (!clocks || !(is_wall(id) || is_mono(id))) return REAL(clock_nanosleep)(id, flags, t, left);
    double s = flags & TIMER_ABSTIME ? seconds(t) - fake_now(id) : seconds(t);
    return nap(end_of(s)) == 0 ? 0 : errno;
}

/* Waits until an absolute time: in slices of real time on the real monotonic clock. */
static int sem_until(sem_t *sem, clockid_t id, const struct timespec *t) {
    int (*real)(sem_t *, clockid_t, const struct timespec *) = dlsym(RTLD_NEXT, "sem_clockwait");
    double until = end_of(seconds(t) - fake_now(id));
    for (;;) {
        struct timespec part = spec(real_now(CLOCK_MONOTONIC) + slice(until));
        if (real(sem, CLOCK_MONOTONIC, &part) == 0) return 0;
        if (errno != ETIMEDOUT || over(until)) return -1;
    }
}

int sem_clockwait(sem_t *restrict sem, clockid_t id, const struct timespec *restrict t) {
    int (*real)(sem_t *, clockid_t, const struct timespec *) = dlsym(RTLD_NEXT, "sem_clockwait");
    return clocks ? sem_until(sem, id, t) : real(sem, id, t);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict t) {
    return clocks ? sem_until(sem, CLOCK_REALTIME, t) : REAL(sem_timedwait)(sem, t);
}

/* Which clock a condition counts by is not told here; no monotonic clock is beyond 2001. A wait may end early. */
static struct timespec when(const struct timespec *t, double now) {
    double left = (seconds(t) - now) / clocks->rate;
    return spec(left);
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict t) {
    static __typeof__(&pthread_cond_timedwait) real;
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!clocks) return real(cond, mutex, t);
    clockid_t id = t->tv_sec > 1000000000 ? CLOCK_REALTIME : CLOCK_MONOTONIC;
    struct timespec wait = when(t, fake_now(id)), until;
    real_gettime(id, &until);
    add_ns(&until, seconds(&wait));
    return real(cond, mutex, &until);
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, clockid_t id,
                           const struct timespec *restrict t) {
    int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *) =
        dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    if (!clocks) return real(cond, mutex, id, t);
    struct timespec wait = when(t, fake_now(id)), until;
    real_gettime(id, &until);
    add_ns(&until, seconds(&wait));
    return real(cond, mutex, id, &until);
}
