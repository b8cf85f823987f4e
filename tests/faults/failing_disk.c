/* Calls that change files below a folder are counted. One of them can end the process, and the disk can be full after so many bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char below[4096];
static long calls, written, end_at, room = -1;

void arm(const char *folder, long at, long bytes) {
    strncpy(below, folder, sizeof below - 1);
    calls = written = 0, end_at = at, room = bytes;
}
long count_calls(void) { return calls; }
long count_bytes(void) { return written; }

static int is_below(const char *path) { return below[0] && path && !strncmp(path, below, strlen(below)); }

static int is_file_below(int fd) {
    char link[64], path[4096];
    if (!below[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static int ends_here(void) { return ++calls == end_at; }
static void end(void) { kill(getpid(), SIGKILL); }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
    if (!is_file_below(fd)) return REAL(write)(fd, data, size);
    if (ends_here()) { /* half of it is written */
        REAL(write)(fd, data, size / 2);
        end();
    }
    if (room >= 0) {
        if (room == 0 && size > 0) { errno = ENOSPC; return -1; }
        if ((size_t)room < size) size = room;
        room -= size;
    }
    written += size;
    return REAL(write)(fd, data, size);
}

#define BEFORE(watched) if (watched) { if (ends_here()) end(); }

int rename(const char *from, const char *to) { BEFORE(is_below(to)); return REAL(rename)(from, to); }
int unlink(const char *path) { BEFORE(is_below(path)); return REAL(unlink)(path); }
int mkdir(const char *path, mode_t mode) { BEFORE(is_below(path)); return REAL(mkdir)(path, mode); }
int fsync(int fd) { BEFORE(is_file_below(fd)); return REAL(fsync)(fd); }
int ftruncate(int fd, off_t size) { BEFORE(is_file_below(fd)); return REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { BEFORE(is_file_below(fd)); return REAL(ftruncate64)(fd, size); }
