/* A stand-in for libnvidia-ml.so.1, at the border where the real pynvml loads it. It answers from a text file, named by
 * FAKE_NVML and read anew at each call, so that a test can heat, break and lose cards while a program runs:
 *
 *     count 2
 *     gpu0.uuid GPU-aaaa
 *     gpu0.temperature 61
 *     gpu0.error.nvmlDeviceGetPowerUsage 3        an error code for that function of that card
 *     error.nvmlInitWithFlags 9                   ... or of any card
 *
 * Each call is appended to the file named by FAKE_NVML_CALLS, with the number of its thread.
 * Compiled with -DOLD_DRIVER it lacks the functions that old drivers lack.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, MAX_GPUS = 16 };

typedef struct { int index, mig; } Device;
static Device gpus[MAX_GPUS], slices[MAX_GPUS];
static int users = 0;
static pid_t owner = 0;

static int text_of(const char *key, char *out, size_t size) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512];
    int found = 0;
    if (!file) return 0;
    while (!found && fgets(line, sizeof line, file)) {
        char *space = strchr(line, ' ');
        if (!space) continue;
        *space = 0;
        if (strcmp(line, key) == 0) {
            space[1 + strcspn(space + 1, "\n")] = 0;
            snprintf(out, size, "%s", space + 1);
            found = 1;
        }
    }
    fclose(file);
    return found;
}

static long number_of(const char *key, long otherwise) {
    char text[256];
    return text_of(key, text, sizeof text) ? strtol(text, NULL, 0) : otherwise;
}

/* Notes the call; the error that the file names for it, or that the library is not initialised in this process. */
static int begin(const char *function, const Device *device) {
    char key[256];
    const char *path = getenv("FAKE_NVML_CALLS");
    FILE *file = path ? fopen(path, "a") : NULL;
    long error;
    if (file) {
        fprintf(file, "%s %ld %ld\n", function, (long)getpid(), (long)syscall(SYS_gettid));
        fclose(file);
    }
    snprintf(key, sizeof key, "error.%s", function);
    error = number_of(key, SUCCESS);
    if (device && !error) {
        snprintf(key, sizeof key, "gpu%d.error.%s", device->index, function);
        error = number_of(key, SUCCESS);
    }
    if (device && !error) {
        snprintf(key, sizeof key, "gpu%d.error", device->index);
        error = number_of(key, SUCCESS);
    }
    if (!error && strcmp(function, "nvmlInitWithFlags") && (users == 0 || owner != getpid())) return UNINITIALIZED;
    return (int)error;
}

/* A value of a card; without one in the file the card does not support it. */
static int value_of(const char *function, const Device *device, const char *what, long *value) {
    char key[256], text[64];
    int error = begin(function, device);
    if (error) return error;
    snprintf(key, sizeof key, "gpu%d.%s", device->index, what);
    if (!text_of(key, text, sizeof text)) return NOT_SUPPORTED;
    *value = strtol(text, NULL, 0);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    int error = begin("nvmlInitWithFlags", NULL);
    (void)flags;
    if (error) return error;
    if (owner != getpid()) users = 0;
    owner = getpid();
    users++;
    return SUCCESS;
}

int nvmlShutdown(void) {
    int error = begin("nvmlShutdown", NULL);
    if (!error) users--;
    return error;
}

const char *nvmlErrorString(int error) {
    static char text[64];
    snprintf(text, sizeof text, "fake error %d", error);
    return text;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    int error = begin("nvmlDeviceGetCount", NULL);
    if (!error) *count = (unsigned)number_of("count", 0);
    return error;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    int error = begin("nvmlDeviceGetHandleByIndex", NULL);
    if (error) return error;
    if (index >= (unsigned)number_of("count", 0) || index >= MAX_GPUS) return INVALID_ARGUMENT;
    gpus[index].index = (int)index;
    *device = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    char key[64], text[128];
    int i, error = begin("nvmlDeviceGetHandleByUUID", NULL);
    if (error) return error;
    for (i = 0; i < number_of("count", 0) && i < MAX_GPUS; i++) {
        gpus[i].index = slices[i].index = i;
        slices[i].mig = 1;
        snprintf(key, sizeof key, "gpu%d.uuid", i);
        if (text_of(key, text, sizeof text) && !strcmp(text, uuid)) return *device = &gpus[i], SUCCESS;
        snprintf(key, sizeof key, "gpu%d.mig_uuid", i);
        if (text_of(key, text, sizeof text) && !strcmp(text, uuid)) return *device = &slices[i], SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *slice, Device **card) {
    int error = begin("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", slice);
    if (!error) *card = &gpus[slice->index];
    return error;
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned size) {
    char key[64];
    int error = begin("nvmlDeviceGetUUID", device);
    if (error) return error;
    snprintf(key, sizeof key, "gpu%d.%s", device->index, device->mig ? "mig_uuid" : "uuid");
    return text_of(key, uuid, size) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetName(Device *device, char *name, unsigned size) {
    char key[64];
    int error = begin("nvmlDeviceGetName", device);
    if (error) return error;
    snprintf(key, sizeof key, "gpu%d.name", device->index);
    if (!text_of(key, name, size)) snprintf(name, size, "Fake GPU");
    return SUCCESS;
}

int nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *celsius) {
    long value = 0;
    int error = value_of("nvmlDeviceGetTemperature", device, "temperature", &value);
    (void)sensor;
    if (!error) *celsius = (unsigned)value;
    return error;
}

int nvmlDeviceGetTemperatureThreshold(Device *device, unsigned which, unsigned *celsius) {
    long value = 0;
    int error = value_of("nvmlDeviceGetTemperatureThreshold", device, which ? "slowdown" : "shutdown", &value);
    if (!error) *celsius = (unsigned)value;
    return error;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) {
    long value = 0;
    int error = value_of("nvmlDeviceGetPowerUsage", device, "power", &value);
    if (!error) *milliwatts = (unsigned)value;
    return error;
}

int nvmlDeviceGetUtilizationRates(Device *device, unsigned *gpu_and_memory) {
    long value = 0;
    int error;
    if (device->mig) return begin("nvmlDeviceGetUtilizationRates", device), NOT_SUPPORTED;
    error = value_of("nvmlDeviceGetUtilizationRates", device, "utilization", &value);
    if (!error) gpu_and_memory[0] = (unsigned)value, gpu_and_memory[1] = 1;
    return error;
}

int nvmlDeviceGetMemoryInfo(Device *device, unsigned long long *total_free_used) {
    long value = 0;
    int error = value_of("nvmlDeviceGetMemoryInfo", device, device->mig ? "mig_memory" : "memory", &value);
    if (!error) total_free_used[0] = 1ULL << 34, total_free_used[1] = 0, total_free_used[2] = (unsigned long long)value;
    return error;
}

int nvmlDeviceGetClockInfo(Device *device, unsigned which, unsigned *mhz) {
    long value = 0;
    int error = value_of("nvmlDeviceGetClockInfo", device, which == 1 ? "sm_clock" : "memory_clock", &value);
    if (!error) *mhz = (unsigned)value;
    return error;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *bits) {
    long value = 0;
    int error = value_of("nvmlDeviceGetCurrentClocksThrottleReasons", device, "throttle", &value);
    if (!error) *bits = (unsigned long long)value;
    return error;
}

#ifndef OLD_DRIVER
typedef struct { unsigned version, sensor; int celsius; } Temperature;

int nvmlDeviceGetTemperatureV(Device *device, Temperature *temperature) {
    long value = 0;
    int error = value_of("nvmlDeviceGetTemperatureV", device, "temperature", &value);
    if (!error && temperature->version != 0x100000C) return 25; /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */
    if (!error) temperature->celsius = (int)value;
    return error;
}

typedef struct { unsigned version; int celsius; } Margin;

int nvmlDeviceGetMarginTemperature(Device *device, Margin *margin) {
    long value = 0;
    int error = value_of("nvmlDeviceGetMarginTemperature", device, "margin", &value);
    if (!error) margin->celsius = (int)value;
    return error;
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *bits) {
    long value = 0;
    int error = value_of("nvmlDeviceGetCurrentClocksEventReasons", device, "throttle", &value);
    if (!error) *bits = (unsigned long long)value;
    return error;
}
#endif
