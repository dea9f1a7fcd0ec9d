/* A stand-in for libnvidia-ml.so.1, so that the real nvidia-ml-py (ctypes) path runs on a machine without a GPU. Not a
 * model of the driver: it knows neither its timing nor its quantisation, and only the functions that ceilingd calls.
 * __init__.py builds it and says how to use it.
 *
 * The state file, FAKE_NVML_STATE, holds "KEY VALUE" lines ('#' starts a comment) and is read again whenever it is
 * replaced (inode, size or mtime changed), so a test changes the "hardware" live; write a new file and rename it over the
 * old one, so that no half-written state is ever read.
 *   count 2                                  number of GPUs
 *   sys.driver 580.95.05                     versions: sys.driver, sys.nvml, sys.cuda (13000 is 13.0)
 *   0.util.gpu 97      *.temp 61             a field of GPU 0; of every GPU without its own line
 *   0.nvmlDeviceGetPcieThroughput.error 15   that call on GPU 0 returns NVML_ERROR_GPU_IS_LOST
 *   *.nvmlDeviceGetPcieThroughput.sleep_ms 20     ... takes 20 ms (the real one's sampling window)
 *   0.nvmlDeviceGetPowerUsage.hang 1         ... does not return until this line is gone
 *   0.*.error 15                             every call on GPU 0 fails, getting its handle included
 *   sys.nvmlInitWithFlags.error 9            a global call
 * FAKE_NVML_CALLS, if set, gets one line a call, when it returns: "monotonic_ns thread function target result".
 * Both names are looked up at each call. A field's text is at most 95 characters and keeps its inner spaces.
 */
#define _GNU_SOURCE
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <fcntl.h>
#include <nvml.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_GPUS 64
#define API __attribute__((visibility("default")))

struct entry { char key[96]; char value[96]; };
struct nvmlDevice_st { unsigned index; };

static struct entry *entries;
static size_t n_entries;
static struct stat seen;
static struct nvmlDevice_st devices[MAX_GPUS];
static int refcount;
static char log_path[512];
static int log_fd = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int by_key(const void *a, const void *b) { return strcmp(((const struct entry *)a)->key, ((const struct entry *)b)->key); }

static void reload(void) {                               /* lock held */
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat now;
    if (!path || stat(path, &now)) return;
    if (now.st_ino == seen.st_ino && now.st_size == seen.st_size && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return;
    FILE *f = fopen(path, "r");
    if (!f) return;
    struct entry *fresh = NULL, e;
    size_t n = 0, room = 0;
    char line[256];
    while (fgets(line, sizeof line, f))
        if (line[0] != '#' && sscanf(line, "%95s %95[^\n]", e.key, e.value) == 2) {
            if (n == room) fresh = realloc(fresh, (room = room ? 2 * room : 64) * sizeof e);
            fresh[n++] = e;
        }
    fclose(f);
    if (n) qsort(fresh, n, sizeof e, by_key);
    free(entries);
    entries = fresh, n_entries = n, seen = now;
}

static const char *find(const char *target, const char *field) {
    struct entry k, *hit;
    snprintf(k.key, sizeof k.key, "%s%s%s", target, *target ? "." : "", field);
    hit = n_entries ? bsearch(&k, entries, n_entries, sizeof k, by_key) : NULL;
    return hit ? hit->value : NULL;
}

static const char *text(const char *target, const char *field, const char *otherwise) {
    const char *v = find(target, field);
    if (!v && *target && strcmp(target, "sys")) v = find("*", field);
    return v ? v : otherwise;
}

static unsigned long long number(const char *target, const char *field, unsigned long long otherwise) {
    const char *v = text(target, field, NULL);
    return v ? strtoull(v, NULL, 0) : otherwise;
}

static void note(const char *fn, const char *target, nvmlReturn_t rc) {
    const char *path = getenv("FAKE_NVML_CALLS");
    if (!path) path = "";
    if (strcmp(path, log_path)) {
        if (log_fd >= 0) close(log_fd);
        snprintf(log_path, sizeof log_path, "%s", path);
        log_fd = *path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    }
    if (log_fd < 0) return;
    struct timespec t;
    char line[160];
    clock_gettime(CLOCK_MONOTONIC, &t);
    int n = snprintf(line, sizeof line, "%lld %ld %s %s %d\n", (long long)t.tv_sec * 1000000000 + t.tv_nsec,
                     (long)syscall(SYS_gettid), fn, target, (int)rc);
    if (write(log_fd, line, n) != n) log_fd = -1;
}

/* What every call does first: state, injected delay, injected error. Returns with the lock held. */
static nvmlReturn_t enter(const char *fn, nvmlDevice_t dev, char target[8]) {
    char field[96];
    pthread_mutex_lock(&lock);
    reload();
    if (dev) snprintf(target, 8, "%u", dev->index);
    else strcpy(target, "sys");
    snprintf(field, sizeof field, "%s.sleep_ms", fn);
    unsigned long long ms = number(target, field, 0);
    if (ms) {
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){ms / 1000, (long)(ms % 1000) * 1000000}, NULL);
        pthread_mutex_lock(&lock);
    }
    snprintf(field, sizeof field, "%s.hang", fn);
    while (number(target, field, 0)) {
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){0, 1000000}, NULL);
        pthread_mutex_lock(&lock);
        reload();
    }
    snprintf(field, sizeof field, "%s.error", fn);
    nvmlReturn_t rc = (nvmlReturn_t)number(target, field, number(target, "*.error", NVML_SUCCESS));
    if (rc == NVML_SUCCESS && !refcount && strncmp(fn, "nvmlInit", 8) && strcmp(fn, "nvmlSystemGetNVMLVersion"))
        rc = NVML_ERROR_UNINITIALIZED;                   /* asking for the library's version needs no initialization */
    note(fn, target, rc);
    return rc;
}

#define SYS(NAME, ARGS, ...)                                    \
    API nvmlReturn_t NAME ARGS {                                \
        char t[8];                                              \
        nvmlReturn_t rc = enter(#NAME, NULL, t);                \
        if (rc == NVML_SUCCESS) { __VA_ARGS__; }                \
        pthread_mutex_unlock(&lock);                            \
        return rc;                                              \
    }
#define DEV(NAME, ARGS, ...)                                    \
    API nvmlReturn_t NAME ARGS {                                \
        char t[8];                                              \
        if (device < devices || device >= devices + MAX_GPUS) return NVML_ERROR_INVALID_ARGUMENT; \
        nvmlReturn_t rc = enter(#NAME, device, t);              \
        if (rc == NVML_SUCCESS) { __VA_ARGS__; }                \
        pthread_mutex_unlock(&lock);                            \
        return rc;                                              \
    }
#define DEV_NUMBER(NAME, TYPE, FIELD, OTHERWISE) \
    DEV(NAME, (nvmlDevice_t device, TYPE *out), *out = (TYPE)number(t, FIELD, OTHERWISE))
#define COPY(FIELD, OTHERWISE)                                                        \
    do {                                                                              \
        const char *s = text(t, FIELD, OTHERWISE);                                    \
        if (strlen(s) >= length) rc = NVML_ERROR_INSUFFICIENT_SIZE;                   \
        else strcpy(out, s);                                                          \
    } while (0)

SYS(nvmlInit_v2, (void), refcount++)
SYS(nvmlInitWithFlags, (unsigned flags), (void)flags; refcount++)
SYS(nvmlShutdown, (void), refcount--)
SYS(nvmlSystemGetDriverVersion, (char *out, unsigned length), COPY("driver", "580.95.05"))
SYS(nvmlSystemGetNVMLVersion, (char *out, unsigned length), COPY("nvml", "13.580.95.05"))
SYS(nvmlSystemGetCudaDriverVersion, (int *out), *out = (int)number(t, "cuda", 13000))
SYS(nvmlSystemGetCudaDriverVersion_v2, (int *out), *out = (int)number(t, "cuda", 13000))
SYS(nvmlDeviceGetCount_v2, (unsigned *out), *out = (unsigned)number("", "count", 1))
/* What stands for getting the handle of that GPU: injected errors of its own, then of all its calls. */
static nvmlReturn_t handle_of(unsigned index, const char *fn, nvmlDevice_t *out) {
    char gpu[8], field[96];
    if (index >= MAX_GPUS || index >= number("", "count", 1)) return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(gpu, sizeof gpu, "%u", index);
    snprintf(field, sizeof field, "%s.error", fn);
    devices[index].index = index, *out = &devices[index];
    return (nvmlReturn_t)number(gpu, field, number(gpu, "*.error", NVML_SUCCESS));
}
static void made_uuid(unsigned index, char out[48]) { snprintf(out, 48, "GPU-00000000-0000-4000-8000-%012u", index); }

SYS(nvmlDeviceGetHandleByIndex_v2, (unsigned index, nvmlDevice_t *out),
    rc = handle_of(index, "nvmlDeviceGetHandleByIndex_v2", out))
SYS(nvmlDeviceGetHandleByUUID, (const char *uuid, nvmlDevice_t *out),
    rc = NVML_ERROR_NOT_FOUND;
    for (unsigned i = 0; i < number("", "count", 1) && i < MAX_GPUS; i++) {
        char gpu[8], made[48];
        snprintf(gpu, sizeof gpu, "%u", i);
        made_uuid(i, made);
        if (!strcmp(uuid, text(gpu, "uuid", made))) { rc = handle_of(i, "nvmlDeviceGetHandleByUUID", out); break; }
    })

DEV(nvmlDeviceGetName, (nvmlDevice_t device, char *out, unsigned length), COPY("name", "NVIDIA H200"))
DEV(nvmlDeviceGetSerial, (nvmlDevice_t device, char *out, unsigned length), COPY("serial", "1650000000001"))
DEV(nvmlDeviceGetUUID, (nvmlDevice_t device, char *out, unsigned length),
    char made[48];
    made_uuid(device->index, made);
    COPY("uuid", made))
DEV(nvmlDeviceGetVbiosVersion, (nvmlDevice_t device, char *out, unsigned length), COPY("vbios", "96.00.A5.00.01"))
DEV(nvmlDeviceGetPciInfo_v3, (nvmlDevice_t device, nvmlPciInfo_t *out),
    char made[32];
    snprintf(made, sizeof made, "00000000:%02X:00.0", 0x10 + device->index);
    memset(out, 0, sizeof *out);
    snprintf(out->busId, sizeof out->busId, "%s", text(t, "bus_id", made));
    sscanf(out->busId, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff,
             out->device & 0xff);
    out->pciDeviceId = 0x233510de)
DEV(nvmlDeviceGetIndex, (nvmlDevice_t device, unsigned *out), *out = device->index)
DEV(nvmlDeviceGetMinorNumber, (nvmlDevice_t device, unsigned *out), *out = device->index)
DEV(nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, nvmlUtilization_t *out),
    out->gpu = (unsigned)number(t, "util.gpu", 50); out->memory = (unsigned)number(t, "util.memory", 25))
DEV(nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t *out),
    out->total = number(t, "mem.total", 150754820096ULL);       /* version 1 counts the reserve as used */
    out->used = number(t, "mem.used", 1ULL << 30) + number(t, "mem.reserved", 600ULL << 20);
    out->free = out->total - out->used)
DEV(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, nvmlMemory_v2_t *out),
    out->total = number(t, "mem.total", 150754820096ULL); out->used = number(t, "mem.used", 1ULL << 30);
    out->reserved = number(t, "mem.reserved", 600ULL << 20); out->free = out->total - out->used - out->reserved)
DEV(nvmlDeviceGetPcieThroughput, (nvmlDevice_t device, nvmlPcieUtilCounter_t counter, unsigned *out),
    *out = (unsigned)number(t, counter == NVML_PCIE_UTIL_TX_BYTES ? "pcie.tx_kbps" : "pcie.rx_kbps", 1000))
DEV(nvmlDeviceGetTemperature, (nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned *out),
    (void)sensor; *out = (unsigned)number(t, "temp", 40))
DEV(nvmlDeviceGetTemperatureV, (nvmlDevice_t device, nvmlTemperature_t *out),
    if (out->version != nvmlTemperature_v1) rc = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    else out->temperature = (int)number(t, "temp", 40))
DEV(nvmlDeviceGetNvLinkState, (nvmlDevice_t device, unsigned link, nvmlEnableState_t *active),
    unsigned long long links = number(t, "nvlink.count", 0);    /* how many it has; nvlink.active: how many are up */
    if (!links) rc = NVML_ERROR_NOT_SUPPORTED;
    else if (link >= links) rc = NVML_ERROR_INVALID_ARGUMENT;
    else *active = link < number(t, "nvlink.active", links) ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED)
DEV(nvmlDeviceGetClockInfo, (nvmlDevice_t device, nvmlClockType_t kind, unsigned *out),
    *out = (unsigned)number(t, kind == NVML_CLOCK_MEM ? "clock.mem" : "clock.sm", 1980))
DEV(nvmlDeviceGetMaxClockInfo, (nvmlDevice_t device, nvmlClockType_t kind, unsigned *out),
    *out = (unsigned)number(t, kind == NVML_CLOCK_MEM ? "clock.mem.max" : "clock.sm.max", 1980))
DEV(nvmlDeviceGetPerformanceState, (nvmlDevice_t device, nvmlPstates_t *out), *out = (nvmlPstates_t)number(t, "pstate", 0))
DEV(nvmlDeviceGetPersistenceMode, (nvmlDevice_t device, nvmlEnableState_t *out), *out = (nvmlEnableState_t)number(t, "persistence", 1))
DEV_NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, "pcie.gen", 5)
DEV_NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "pcie.gen.max", 5)
DEV_NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned, "pcie.gen.device_max", 5)
DEV_NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "pcie.width", 16)
DEV_NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "pcie.width.max", 16)
DEV_NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, "pcie.replays", 0)
DEV_NUMBER(nvmlDeviceGetPowerUsage, unsigned, "power.mw", 120000)
DEV_NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power.limit_mw", 700000)
DEV_NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, "power.limit_mw", 700000)
DEV_NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, "power.limit_default_mw", 700000)
DEV_NUMBER(nvmlDeviceGetMemoryBusWidth, unsigned, "mem.bus_width", 6016)
DEV_NUMBER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, "energy.mj", 1000)
DEV_NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "throttle", 0)
DEV_NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "throttle", 0)

static void processes(const char *t, unsigned *count, nvmlProcessInfo_t *infos, nvmlReturn_t *rc) {
    unsigned have = (unsigned)number(t, "procs", 0), room = *count;
    *count = have;
    if (have > room) *rc = NVML_ERROR_INSUFFICIENT_SIZE;
    else
        for (unsigned i = 0; i < have; i++)
            infos[i] = (nvmlProcessInfo_t){.pid = (unsigned)number(t, "procs.pid", 1) + i, .usedGpuMemory = 1ULL << 30,
                                           .gpuInstanceId = ~0u, .computeInstanceId = ~0u};
}
DEV(nvmlDeviceGetComputeRunningProcesses_v3, (nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos),
    processes(t, count, infos, &rc))
DEV(nvmlDeviceGetGraphicsRunningProcesses_v3, (nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos),
    (void)infos; *count = 0)
DEV(nvmlDeviceGetProcessUtilization, (nvmlDevice_t device, nvmlProcessUtilizationSample_t *out, unsigned *count, unsigned long long since),
    (void)out; (void)since; *count = 0; rc = NVML_ERROR_NOT_FOUND)
DEV_NUMBER(nvmlDeviceGetFanSpeed, unsigned, "fan", 0)
/* field.<id> lines, ids as NVML_FI_* in nvml.h; a field without a line is NOT_SUPPORTED */
DEV(nvmlDeviceGetFieldValues, (nvmlDevice_t device, int count, nvmlFieldValue_t *values),
    for (int i = 0; i < count; i++) {
        char key[32];
        snprintf(key, sizeof key, "field.%u", values[i].fieldId);
        const char *v = text(t, key, NULL);
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        values[i].timestamp = (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
        values[i].latencyUsec = 0;
        values[i].valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        values[i].value.ullVal = v ? strtoull(v, NULL, 0) : 0;
        values[i].nvmlReturn = v ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
    })

/* For tests that share a process: forget initialization, state and log. */
API void fake_nvml_reset(void) {
    pthread_mutex_lock(&lock);
    free(entries);
    entries = NULL, n_entries = 0, refcount = 0;
    memset(&seen, 0, sizeof seen);
    if (log_fd >= 0) close(log_fd);
    log_fd = -1, *log_path = 0;
    pthread_mutex_unlock(&lock);
}

API const char *nvmlErrorString(nvmlReturn_t rc) {
    switch ((int)rc) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT: return "Timeout";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case NVML_ERROR_RESET_REQUIRED: return "GPU requires reset";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}
