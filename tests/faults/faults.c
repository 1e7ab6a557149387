/* Makes calls of the C library fail, one at a time, in our extension modules and nowhere else.

   What a module calls, it calls through pointers in its own global offset table. Those of the
   functions below are replaced, in the modules of one directory, by a function that notes the call
   and either passes it on or fails it. So no other library is disturbed, nothing needs preloading,
   and it works beneath a sanitizer, whose functions are then the ones passed on to. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define IS_POINTER(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_POINTER(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#endif

/* How a failure is told: -1 and errno, NULL and errno, the error number itself; NOTED: never. */
enum { MINUS, NOTHING, NUMBER, NOTED };

#define EACH(X) \
    X(mmap64, MINUS) X(munmap, MINUS) X(mprotect, MINUS) X(madvise, MINUS) X(munlock, MINUS) \
    X(syscall, MINUS) X(open64, MINUS) X(close, NOTED) X(fstat64, MINUS) X(ftruncate64, MINUS) \
    X(fstatfs64, MINUS) X(fallocate64, MINUS) X(posix_fallocate64, NUMBER) X(pwrite64, MINUS) \
    X(fcntl64, MINUS) X(ioctl, MINUS) X(pread64, MINUS) X(write, MINUS) X(recvmsg, MINUS) X(malloc, NOTHING) \
    X(sendmsg, MINUS) X(socketpair, MINUS) \
    X(calloc, NOTHING) X(realloc, NOTHING) X(strdup, NOTHING) X(posix_memalign, NUMBER) X(free, NOTED) \
    X(pthread_create, NUMBER) X(pthread_key_create, NUMBER) X(pthread_setspecific, NUMBER) \
    X(__register_atfork, NUMBER)

typedef long (*Function)(long, ...);
typedef struct {
    int32_t function;        /* its place in EACH; PYTHON and more: one of Python's */
    int32_t state;           /* PLAIN, ARMED, FAILED */
    long arguments[4];
    long result;
} Call;

enum { PLAIN, ARMED, FAILED };
enum { MOST = 1 << 16, PYTHON = 1000 };
#define NAME(name, kind) #name,
#define KIND(name, kind) kind,
#define ORDER(name, kind) ID_##name,
enum { EACH(ORDER) FUNCTIONS };
static const char *const names[] = {EACH(NAME)};
static const int kinds[] = {EACH(KIND)};
static Function reals[FUNCTIONS];

static Call calls[MOST];
static uint64_t n_calls, n_alike;                /* atomic */
static int noting, armed;
/* Which call made while armed is to fail: of this function, with this argument if `which` is one,
   the nth, from 0, and if it lasts, all after it. */
static struct { int function, which, error, lasts; long argument; int64_t nth; } wanted;

static int can_fail(int function, long first) {
    if (function == ID_syscall)
        return first == SYS_memfd_create || first == SYS_mlock2 || first == SYS_mbind
            || first == SYS_membarrier;
    return kinds[function] != NOTED;
}

/* Whether this call is to fail. */
static int note(int function, int fallible, const long *arguments, Call **at) {
    static Call nowhere;
    uint64_t i = __atomic_fetch_add(&n_calls, 1, __ATOMIC_RELAXED);
    Call *call = i < MOST ? &calls[i] : &nowhere;
    call->function = function;
    call->state = PLAIN;
    memcpy(call->arguments, arguments, sizeof call->arguments);
    if (armed && fallible) {
        call->state = ARMED;
        if (function == wanted.function
            && (wanted.which < 0 || (int)arguments[wanted.which] == wanted.argument)) {
            int64_t nth = (int64_t)__atomic_fetch_add(&n_alike, 1, __ATOMIC_RELAXED);
            if (nth == wanted.nth || (wanted.lasts && nth > wanted.nth)) call->state = FAILED;
        }
    }
    *at = call;
    return call->state == FAILED;
}

static long intercept(int function, long a, long b, long c, long d, long e, long f, long g) {
    const long arguments[4] = {a, b, c, d};
    long result;
    Call *call;
    if (!noting) return reals[function](a, b, c, d, e, f, g);
    if (note(function, can_fail(function, a), arguments, &call)) {
        call->result = -1;
        if (kinds[function] == NUMBER) return wanted.error;
        errno = wanted.error;
        return kinds[function] == NOTHING ? 0 : -1;
    }
    result = reals[function](a, b, c, d, e, f, g);
    call->result = function == ID_posix_memalign && !result ? *(long *)a : result;
    return result;
}

#define WRAP(name, kind) \
    static long wrap_##name(long a, long b, long c, long d, long e, long f, long g) { \
        return intercept(ID_##name, a, b, c, d, e, f, g); \
    }
EACH(WRAP)
#define WRAPPER(name, kind) (Function)wrap_##name,
static const Function wrappers[] = {EACH(WRAPPER)};

static void replace(ElfW(Addr) base, const ElfW(Rela) *rela, size_t nbytes,
                    const ElfW(Sym) *symbols, const char *strings) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < nbytes / sizeof *rela; i++) {
        if (!IS_POINTER(ELF64_R_TYPE(rela[i].r_info))) continue;
        const char *name = strings + symbols[ELF64_R_SYM(rela[i].r_info)].st_name;
        void **slot = (void **)(base + rela[i].r_offset);
        for (int function = 0; function < FUNCTIONS; function++) {
            if (strcmp(name, names[function])) continue;
            mprotect((void *)((uintptr_t)slot & ~(page - 1)), page, PROT_READ | PROT_WRITE);
            *slot = (void *)wrappers[function];
        }
    }
}

static int visit(struct dl_phdr_info *object, size_t size, void *directory) {
    const ElfW(Dyn) *dynamic = NULL;
    const ElfW(Rela) *plt = NULL, *rela = NULL;
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    size_t plt_nbytes = 0, rela_nbytes = 0;
    (void)size;
    if (strncmp(object->dlpi_name, directory, strlen(directory))) return 0;
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        const void *at = (const void *)dynamic->d_un.d_ptr;
        switch (dynamic->d_tag) {
        case DT_SYMTAB: symbols = at; break;
        case DT_STRTAB: strings = at; break;
        case DT_JMPREL: plt = at; break;
        case DT_PLTRELSZ: plt_nbytes = dynamic->d_un.d_val; break;
        case DT_RELA: rela = at; break;
        case DT_RELASZ: rela_nbytes = dynamic->d_un.d_val; break;
        }
    }
    if (plt) replace(object->dlpi_addr, plt, plt_nbytes, symbols, strings);
    if (rela) replace(object->dlpi_addr, rela, rela_nbytes, symbols, strings);
    return 0;
}

/* ---- for Python ------------------------------------------------------------------------- */

const char *faults_name(int function) { return function < FUNCTIONS ? names[function] : NULL; }
int faults_kind(int function) { return kinds[function]; }

/* Take over the modules that are loaded from this directory; again after others are loaded. */
int faults_install(const char *directory) {
    for (int i = 0; i < FUNCTIONS; i++)
        if (!reals[i] && !(reals[i] = (Function)dlsym(RTLD_DEFAULT, names[i])))
            if (strcmp(names[i], "__register_atfork"))
                return i + 1;
    return dl_iterate_phdr(visit, (void *)directory);
}

void faults_note(int on) { if (on) n_calls = 0; noting = on; }

void faults_arm(int function, int which, long argument, int64_t nth, int error, int lasts) {
    wanted.function = function;
    wanted.which = which;
    wanted.argument = argument;
    wanted.nth = nth;
    wanted.error = error;
    wanted.lasts = lasts;
    n_alike = 0;
    armed = 1;
}

void faults_disarm(void) { armed = 0; }

/* A call that Python makes for us: the error to fail it with, or 0. */
int faults_python(int which) {
    const long arguments[4] = {0};
    Call *call;
    return noting && armed && note(PYTHON + which, 1, arguments, &call) ? wanted.error : 0;
}

uint64_t faults_calls(const Call **first) {
    *first = calls;
    return n_calls < MOST ? n_calls : MOST;
}
