/* Preloaded into a process: counts the operations that change files below one folder, and at the n-th of them kills the
 * process or lets the operation fail. See tests/faults/file_faults.py, which compiles it and shares the block.
 *
 * The C library's functions are replaced, which CPython, numpy, libstdc++ and Rust call. What the C library does inside
 * (fopen, fwrite's buffer) goes unseen, but for fwrite itself.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL, KILL_GROUP, NO_SPACE, FAULTY, FORBIDDEN, SHORT };

/* Shared with whoever asks; the layout is repeated in file_faults.py. */
struct block {
    int armed, how;
    long target, count, log_bytes;
    char folder[1024];
    char log[1 << 20]; /* "operation path\n" for each */
};

static struct block *block;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("FILE_FAULTS_BLOCK");
    int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0) : -1;
    if (file < 0) return;
    void *memory = (void *)syscall(SYS_mmap, NULL, sizeof(struct block), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED) block = memory;
    syscall(SYS_close, file);
}

/* The absolute path of `path` seen from `folder`, or of the open file `folder` where path is NULL. */
static int absolute(int folder, const char *path, char *out, size_t room) {
    size_t used = 0;
    if (path == NULL || path[0] != '/') {
        char link[64];
        if (folder == AT_FDCWD) strcpy(link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, out, room - 1);
        if (size < 0) return 0;
        used = (size_t)size;
        if (path != NULL && used + 1 < room) out[used++] = '/';
    }
    if (path != NULL) {
        size_t size = strlen(path);
        if (used + size >= room) return 0;
        memcpy(out + used, path, size);
        used += size;
    }
    out[used] = 0;
    return 1;
}

static int inside(const char *path) {
    size_t size = strlen(block->folder);
    return strncmp(path, block->folder, size) == 0 && (path[size] == '/' || path[size] == 0);
}

/* What can fail for want of room. */
static int allocates(const char *name) {
    static const char *const names[] = {"create", "write", "mkdir", "fsync", "fallocate", "link", "symlink", "copy"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i], name) == 0) return 1;
    return 0;
}

static int gives_permission(const char *name) { /* what is asked for by name */
    return strcmp(name, "write") && strcmp(name, "fsync") && strcmp(name, "close") && strcmp(name, "truncate") &&
           strcmp(name, "fallocate") && strcmp(name, "copy") && strcmp(name, "map");
}

/* Counts an operation. 0: do it; SHORT: do half of it; else the errno to fail with. */
static int meet(const char *name, int folder, const char *path) {
    char whole[PATH_MAX];
    if (block == NULL || !__atomic_load_n(&block->armed, __ATOMIC_ACQUIRE)) return 0;
    if (path == NULL && folder >= 0 && folder <= 2) return 0;
    int before = errno;
    if (!absolute(folder, path, whole, sizeof whole) || !inside(whole)) {
        errno = before;
        return 0;
    }
    long number = __atomic_add_fetch(&block->count, 1, __ATOMIC_ACQ_REL);
    char line[PATH_MAX + 64];
    int size = snprintf(line, sizeof line, "%s %s\n", name, whole + strlen(block->folder));
    long at = __atomic_fetch_add(&block->log_bytes, size, __ATOMIC_ACQ_REL);
    if (at + size < (long)sizeof block->log) memcpy(block->log + at, line, (size_t)size);
    errno = before;
    int is_it = number == block->target;
    switch (block->how) {
    case KILL:
        if (is_it) syscall(SYS_kill, getpid(), SIGKILL);
        return 0;
    case KILL_GROUP:
        if (is_it) syscall(SYS_kill, 0, SIGKILL);
        return 0;
    case NO_SPACE: /* it stays full */
        return block->target > 0 && number >= block->target && allocates(name) ? ENOSPC : 0;
    case FAULTY:
        return is_it ? EIO : 0;
    case FORBIDDEN:
        return is_it && gives_permission(name) ? EACCES : 0;
    case SHORT:
        return is_it && strcmp(name, "write") == 0 ? -SHORT : 0;
    default:
        return 0;
    }
}

#define REAL(type, name, ...)                                  \
    static type (*real)(__VA_ARGS__);                          \
    if (real == NULL) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define REFUSE(name, folder, path, failed)        \
    do {                                          \
        int found = meet(name, folder, path);     \
        if (found > 0) {                          \
            errno = found;                        \
            return failed;                        \
        }                                         \
    } while (0)

static int changes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)); }

#define OPEN(name)                                                                \
    int name(const char *path, int flags, ...) {                                  \
        REAL(int, name, const char *, int, ...);                                  \
        va_list rest;                                                             \
        va_start(rest, flags);                                                    \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                             \
        if (changes(flags)) REFUSE(flags &O_CREAT ? "create" : "open", AT_FDCWD, path, -1); \
        return real(path, flags, mode);                                           \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                              \
    int name(int folder, const char *path, int flags, ...) {                      \
        REAL(int, name, int, const char *, int, ...);                             \
        va_list rest;                                                             \
        va_start(rest, flags);                                                    \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                             \
        if (changes(flags)) REFUSE(flags &O_CREAT ? "create" : "open", folder, path, -1); \
        return real(folder, path, flags, mode);                                   \
    }
OPENAT(openat)
OPENAT(openat64)

#define CREAT(name)                            \
    int name(const char *path, mode_t mode) {  \
        REAL(int, name, const char *, mode_t); \
        REFUSE("create", AT_FDCWD, path, -1);  \
        return real(path, mode);               \
    }
CREAT(creat)
CREAT(creat64)

#define FOPEN(name)                                                       \
    FILE *name(const char *path, const char *mode) {                      \
        REAL(FILE *, name, const char *, const char *);                   \
        if (strpbrk(mode, "wa+")) REFUSE("create", AT_FDCWD, path, NULL); \
        return real(path, mode);                                          \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* The arguments of a write to `file`, of which SHORT does half. */
#define WRITE(name, parameters, types, half, ...)  \
    ssize_t name parameters {                      \
        REAL(ssize_t, name, UNPACK types);         \
        int found = meet("write", file, NULL);     \
        if (found > 0) {                           \
            errno = found;                         \
            return -1;                             \
        }                                          \
        if (found == -SHORT) half;                 \
        return real(__VA_ARGS__);                  \
    }
#define UNPACK(...) __VA_ARGS__
#define HALF_SIZE size = size > 1 ? size / 2 : size
#define HALF_PARTS count = count > 1 ? 1 : count
#define DATA int file, const void *data, size_t size
#define PARTS int file, const struct iovec *parts, int count
#define DATA_TYPES int, const void *, size_t
#define PARTS_TYPES int, const struct iovec *, int
WRITE(write, (DATA), (DATA_TYPES), HALF_SIZE, file, data, size)
WRITE(pwrite, (DATA, off_t at), (DATA_TYPES, off_t), HALF_SIZE, file, data, size, at)
WRITE(pwrite64, (DATA, off_t at), (DATA_TYPES, off_t), HALF_SIZE, file, data, size, at)
WRITE(writev, (PARTS), (PARTS_TYPES), HALF_PARTS, file, parts, count)
WRITE(pwritev, (PARTS, off_t at), (PARTS_TYPES, off_t), HALF_PARTS, file, parts, count, at)
WRITE(pwritev64, (PARTS, off_t at), (PARTS_TYPES, off_t), HALF_PARTS, file, parts, count, at)
WRITE(pwritev2, (PARTS, off_t at, int flags), (PARTS_TYPES, off_t, int), HALF_PARTS, file, parts, count, at, flags)
WRITE(pwritev64v2, (PARTS, off_t at, int flags), (PARTS_TYPES, off_t, int), HALF_PARTS, file, parts, count, at, flags)

size_t fwrite(const void *data, size_t size, size_t count, FILE *stream) {
    REAL(size_t, fwrite, const void *, size_t, size_t, FILE *);
    REFUSE("write", fileno(stream), NULL, 0);
    return real(data, size, count, stream);
}

#define SYNC(name)                       \
    int name(int file) {                 \
        REAL(int, name, int);            \
        REFUSE("fsync", file, NULL, -1); \
        return real(file);               \
    }
SYNC(fsync)
SYNC(fdatasync)

#define TRUNCATE(name)                   \
    int name(int file, off_t size) {     \
        REAL(int, name, int, off_t);     \
        REFUSE("truncate", file, NULL, -1); \
        return real(file, size);         \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define FALLOCATE(name)                                       \
    int name(int file, off_t at, off_t size) {                \
        REAL(int, name, int, off_t, off_t);                   \
        int found = meet("fallocate", file, NULL);            \
        return found > 0 ? found : real(file, at, size);      \
    }
FALLOCATE(posix_fallocate)
FALLOCATE(posix_fallocate64)

#define SENDFILE(name)                                            \
    ssize_t name(int file, int from, off_t *at, size_t size) {    \
        REAL(ssize_t, name, int, int, off_t *, size_t);           \
        REFUSE("write", file, NULL, -1);                          \
        return real(file, from, at, size);                        \
    }
SENDFILE(sendfile)
SENDFILE(sendfile64)

ssize_t copy_file_range(int from, off64_t *from_at, int file, off64_t *at, size_t size, unsigned flags) {
    REAL(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned);
    REFUSE("copy", file, NULL, -1);
    return real(from, from_at, file, at, size, flags);
}

/* A close that fails has closed all the same. */
int close(int file) {
    REAL(int, close, int);
    int flags = block != NULL && block->armed ? fcntl(file, F_GETFL) : -1;
    int found = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY ? meet("close", file, NULL) : 0;
    int result = real(file);
    if (found > 0) {
        errno = found;
        return -1;
    }
    return result;
}

#define MAP(name)                                                                    \
    void *name(void *where, size_t size, int protection, int flags, int file, off_t at) { \
        REAL(void *, name, void *, size_t, int, int, int, off_t);                    \
        if (file > 2 && (flags & MAP_TYPE) != MAP_PRIVATE && (protection & PROT_WRITE)) \
            REFUSE("map", file, NULL, MAP_FAILED);                                   \
        return real(where, size, protection, flags, file, at);                       \
    }
MAP(mmap)
MAP(mmap64)

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    REFUSE("mkdir", AT_FDCWD, path, -1);
    return real(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(int, mkdirat, int, const char *, mode_t);
    REFUSE("mkdir", folder, path, -1);
    return real(folder, path, mode);
}

int rmdir(const char *path) {
    REAL(int, rmdir, const char *);
    REFUSE("rmdir", AT_FDCWD, path, -1);
    return real(path);
}

int unlink(const char *path) {
    REAL(int, unlink, const char *);
    REFUSE("unlink", AT_FDCWD, path, -1);
    return real(path);
}

int unlinkat(int folder, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    REFUSE(flags &AT_REMOVEDIR ? "rmdir" : "unlink", folder, path, -1);
    return real(folder, path, flags);
}

int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    REFUSE("rename", AT_FDCWD, to, -1);
    return real(from, to);
}

int renameat(int from_folder, const char *from, int folder, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *);
    REFUSE("rename", folder, to, -1);
    return real(from_folder, from, folder, to);
}

int renameat2(int from_folder, const char *from, int folder, const char *to, unsigned flags) {
    REAL(int, renameat2, int, const char *, int, const char *, unsigned);
    REFUSE("rename", folder, to, -1);
    return real(from_folder, from, folder, to, flags);
}

int link(const char *from, const char *to) {
    REAL(int, link, const char *, const char *);
    REFUSE("link", AT_FDCWD, to, -1);
    return real(from, to);
}

int linkat(int from_folder, const char *from, int folder, const char *to, int flags) {
    REAL(int, linkat, int, const char *, int, const char *, int);
    REFUSE("link", folder, to, -1);
    return real(from_folder, from, folder, to, flags);
}

int symlink(const char *from, const char *to) {
    REAL(int, symlink, const char *, const char *);
    REFUSE("symlink", AT_FDCWD, to, -1);
    return real(from, to);
}

int symlinkat(const char *from, int folder, const char *to) {
    REAL(int, symlinkat, const char *, int, const char *);
    REFUSE("symlink", folder, to, -1);
    return real(from, folder, to);
}
