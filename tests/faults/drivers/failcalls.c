/* System calls of a process that fail at a place of a test's choice: preload it, then call fail_arm from this process.
 *
 * fail_arm("fsync", 3, EIO, 1) makes the third fsync from now on fail with EIO, and only that one; with times 0 it and
 * all that follow. Calls on the standard streams are not counted. fail_hits says how many failed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

static const char *armed;
static char name_of[16];
static long first, times, count, hits;
static int code;

void fail_arm(const char *name, long n, int error, long how_often) {
    strncpy(name_of, name, sizeof name_of - 1);
    first = n, times = how_often, code = error, count = hits = 0;
    armed = name_of;
}

long fail_disarm(void) {
    armed = NULL;
    return hits;
}

static int fails(const char *name) {
    if (!armed || strcmp(armed, name) != 0) return 0;
    if (++count < first || (times && hits >= times)) return 0;
    hits++;
    errno = code;
    return 1;
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

#define OPEN(function)                                                             \
    int function(const char *path, int flags, ...) {                               \
        va_list rest;                                                              \
        va_start(rest, flags);                                                     \
        mode_t mode = va_arg(rest, mode_t);                                        \
        va_end(rest);                                                              \
        if (fails("open")) return -1;                                              \
        return REAL(int, #function, const char *, int, ...)(path, flags, mode);    \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(function)                                                                \
    int function(int dir, const char *path, int flags, ...) {                           \
        va_list rest;                                                                   \
        va_start(rest, flags);                                                          \
        mode_t mode = va_arg(rest, mode_t);                                             \
        va_end(rest);                                                                   \
        if (fails("open")) return -1;                                                   \
        return REAL(int, #function, int, const char *, int, ...)(dir, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void *data, size_t size) {
    return fd > 2 && fails("write") ? -1 : REAL(ssize_t, "write", int, const void *, size_t)(fd, data, size);
}

ssize_t read(int fd, void *data, size_t size) {
    return fd > 2 && fails("read") ? -1 : REAL(ssize_t, "read", int, void *, size_t)(fd, data, size);
}

ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    return fails("read") ? -1 : REAL(ssize_t, "pread64", int, void *, size_t, off64_t)(fd, data, size, at);
}

ssize_t pread(int fd, void *data, size_t size, off_t at) {
    return fails("read") ? -1 : REAL(ssize_t, "pread", int, void *, size_t, off_t)(fd, data, size, at);
}

int fsync(int fd) { return fails("fsync") ? -1 : REAL(int, "fsync", int)(fd); }

int rename(const char *old, const char *new) {
    return fails("rename") ? -1 : REAL(int, "rename", const char *, const char *)(old, new);
}

int renameat(int from, const char *old, int to, const char *new) {
    return fails("rename") ? -1 : REAL(int, "renameat", int, const char *, int, const char *)(from, old, to, new);
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
    return fails("link") ? -1 : REAL(int, "linkat", int, const char *, int, const char *, int)(from, old, to, new, flags);
}

int unlink(const char *path) { return fails("unlink") ? -1 : REAL(int, "unlink", const char *)(path); }

int unlinkat(int dir, const char *path, int flags) {
    return fails("unlink") ? -1 : REAL(int, "unlinkat", int, const char *, int)(dir, path, flags);
}

#define TRUNCATE(function, type)                                                          \
    int function(int fd, type size) {                                                     \
        return fails("truncate") ? -1 : REAL(int, #function, int, type)(fd, size);        \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

#define ALLOCATE(function, type)                                                                \
    int function(int fd, type at, type size) {                                                  \
        return fails("allocate") ? code : REAL(int, #function, int, type, type)(fd, at, size);  \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

#define MAP(function, type)                                                                        \
    void *function(void *at, size_t size, int prot, int flags, int fd, type from) {                \
        if (fd >= 0 && fails("mmap")) return MAP_FAILED;                                           \
        return REAL(void *, #function, void *, size_t, int, int, int, type)(at, size, prot, flags, fd, from); \
    }
MAP(mmap, off_t)
MAP(mmap64, off64_t)
