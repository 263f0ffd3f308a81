"""Build `podwire.kernel._libbpf`: the few calls of the system's libbpf that we use.

Run by setuptools (`cffi_modules`) and by developers as a script; never imported by the running
agent. The extension keeps the stable ABI of CPython, so one file serves every version from 3.11 on.
Invariant: no policy here. The C below only does what Python cannot do well: variadic and
option-struct calls, the ring buffer's callback, and libbpf's messages, which it keeps per thread so
that an error can quote its own cause.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from cffi import FFI

# size: two thirds of this file are C, which belongs to one translation unit
TYPES = """
typedef unsigned int u32;
typedef unsigned long long u64;

struct pw_map_info {
    u32 type, id, key_size, value_size, max_entries, map_flags;
    char name[16];
};
struct pw_prog_info {
    u32 type, id, verified_insns;
    unsigned char tag[8];
    char name[16];
    u64 load_time_ns;
};
struct pw_run {
    const char *data_in; u32 data_size_in;
    char *data_out;      u32 data_size_out;
    u32 use_skb, mark, ingress_ifindex, ifindex, gso_size, gso_segs, wire_len, priority;
    u32 cb[5];
    const char *ctx_in;  u32 ctx_size_in;
    u32 repeat, retval, duration_ns;
};
"""
"""Both Python and the C below know these."""

DECLARATIONS = """
struct bpf_object;
struct bpf_map;
struct bpf_program;
struct ring_buffer;
struct pw_drain { ...; };

void pw_messages_reset(void);
const char *pw_messages(void);

struct bpf_object *pw_open(const char *bytes, size_t size, const char *name,
                           char *log, size_t log_size);
int bpf_object__load(struct bpf_object *object);
void bpf_object__close(struct bpf_object *object);
struct bpf_map *bpf_object__next_map(const struct bpf_object *o, const struct bpf_map *prev);
struct bpf_program *bpf_object__next_program(const struct bpf_object *o, struct bpf_program *prev);
const char *bpf_map__name(const struct bpf_map *map);
int bpf_map__fd(const struct bpf_map *map);
int bpf_map__reuse_fd(struct bpf_map *map, int fd);
u32 bpf_map__max_entries(const struct bpf_map *map);
u32 bpf_map__key_size(const struct bpf_map *map);
u32 bpf_map__value_size(const struct bpf_map *map);
u32 bpf_map__map_flags(const struct bpf_map *map);
struct bpf_map *bpf_map__inner_map(struct bpf_map *map);
u32 pw_map_type(const struct bpf_map *map);
char *pw_map_memory(struct bpf_map *map, size_t *size);
const char *bpf_program__name(const struct bpf_program *program);
int bpf_program__fd(const struct bpf_program *program);
int pw_find_variable(struct bpf_object *o, const char *section, const char *name,
                     u32 *offset, u32 *size);

int pw_map_create(u32 type, const char *name, u32 key_size, u32 value_size, u32 max_entries,
                  u32 flags, int inner_fd);
int pw_map_create_typed(u32 type, const char *name, u32 key_size, u32 value_size,
                        u32 max_entries, u32 flags, int btf_fd, u32 key_type, u32 value_type);
int pw_load_btf(const struct bpf_object *o);
int bpf_map__set_inner_map_fd(struct bpf_map *map, int fd);
u32 pw_find_struct(const struct bpf_object *o, const char *name);
int pw_map_create_like(int fd, const char *name, u32 max_entries);
int pw_map_layout(int fd, int of_value, char *out, size_t size);
int pw_is_bpffs(const char *path);
int pw_mount_bpffs(const char *path);
int bpf_map_update_elem(int fd, const void *key, const void *value, u64 flags);
int bpf_map_lookup_elem_flags(int fd, const void *key, void *value, u64 flags);
int bpf_map_delete_elem(int fd, const void *key);
int bpf_map_get_next_key(int fd, const void *key, void *next_key);
int pw_lookup_batch(int fd, void *in_batch, void *out_batch, void *keys, void *values,
                    u32 *count, u64 elem_flags);
int pw_update_batch(int fd, const void *keys, const void *values, u32 *count, u64 elem_flags);
int pw_delete_batch(int fd, const void *keys, u32 *count);
int bpf_map_freeze(int fd);
int pw_map_info(int fd, struct pw_map_info *out);
int pw_prog_info(int fd, struct pw_prog_info *out);
int pw_prog_maps(int fd, u32 *ids, u32 room);
int bpf_map_get_fd_by_id(u32 id);
int bpf_prog_get_fd_by_id(u32 id);
int bpf_obj_pin(int fd, const char *path);
int bpf_obj_get(const char *path);
int libbpf_num_possible_cpus(void);
int pw_run(int fd, struct pw_run *run);

struct pw_drain *pw_drain_open(int map_fd, size_t record_size, size_t records);
void pw_drain_close(struct pw_drain *drain);
int pw_drain_epoll_fd(const struct pw_drain *drain);
int pw_drain_take(struct pw_drain *drain);
const char *pw_drain_bytes(const struct pw_drain *drain, size_t *size, u64 *odd);

int pw_membarrier(int command);

void *malloc(size_t size);
void free(void *memory);
"""

INCLUDES = """
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <linux/bpf.h>
#include <linux/magic.h>
#include <bpf/bpf.h>
#include <bpf/btf.h>
#include <bpf/libbpf.h>
"""

SOURCE = r"""
/* What libbpf said on this thread since the last reset. The first lines name the cause. */
static __thread char messages[8192];
static __thread size_t messages_used;

static int keep_message(enum libbpf_print_level level, const char *format, va_list args)
{
    size_t room = sizeof(messages) - messages_used;
    int written;

    if (level == LIBBPF_DEBUG || level == LIBBPF_INFO)
        return 0;
    written = vsnprintf(messages + messages_used, room, format, args);
    if (written > 0)
        messages_used += (size_t)written < room ? (size_t)written : room - 1;
    return 0;
}

static void pw_messages_reset(void)
{
    libbpf_set_print(keep_message);
    messages_used = 0;
    messages[0] = 0;
}

static const char *pw_messages(void) { return messages; }

/* The bytes must outlive the object: libelf reads them in place. */
static struct bpf_object *pw_open(const char *bytes, size_t size, const char *name,
                                  char *log, size_t log_size)
{
    LIBBPF_OPTS(bpf_object_open_opts, opts, .object_name = name,
                .kernel_log_buf = log, .kernel_log_size = log_size);
    return bpf_object__open_mem(bytes, size, &opts);
}

static u32 pw_map_type(const struct bpf_map *map) { return bpf_map__type(map); }

static char *pw_map_memory(struct bpf_map *map, size_t *size)
{
    return (char *)bpf_map__initial_value(map, size);
}

/* Find a global variable of an opened object: its place inside the section's map. */
static int pw_find_variable(struct bpf_object *o, const char *section, const char *name,
                            u32 *offset, u32 *size)
{
    const struct btf *btf = bpf_object__btf(o);
    const struct btf_type *datasec, *var;
    const struct btf_var_secinfo *info;
    int id, i;

    id = btf ? btf__find_by_name_kind(btf, section, BTF_KIND_DATASEC) : -ENOENT;
    if (id < 0) {
        errno = ENOENT;
        return -ENOENT;
    }
    datasec = btf__type_by_id(btf, id);
    info = btf_var_secinfos(datasec);
    for (i = 0; i < btf_vlen(datasec); i++, info++) {
        var = btf__type_by_id(btf, info->type);
        if (strcmp(btf__name_by_offset(btf, var->name_off), name))
            continue;
        *offset = info->offset;
        *size = info->size;
        return 0;
    }
    errno = ENOENT;
    return -ENOENT;
}

static int pw_map_create(u32 type, const char *name, u32 key_size, u32 value_size,
                         u32 max_entries, u32 flags, int inner_fd)
{
    LIBBPF_OPTS(bpf_map_create_opts, opts, .map_flags = flags,
                .inner_map_fd = inner_fd < 0 ? 0 : (u32)inner_fd);
    return bpf_map_create(type, name, key_size, value_size, max_entries, &opts);
}

static u32 pw_find_struct(const struct bpf_object *o, const char *name)
{
    int id = btf__find_by_name_kind(bpf_object__btf(o), name, BTF_KIND_STRUCT);

    return id > 0 ? id : 0;
}

/* Give the kernel an object's types before the object itself is loaded. */
static int pw_load_btf(const struct bpf_object *o)
{
    const struct btf *btf = bpf_object__btf(o);
    const void *raw;
    u32 size;

    raw = btf ? btf__raw_data(btf, &size) : NULL;
    if (!raw) {
        errno = ENODATA;
        return -ENODATA;
    }
    return bpf_btf_load(raw, size, NULL);
}

/* Create a map with types, so that another build can read the layout of its rows. */
static int pw_map_create_typed(u32 type, const char *name, u32 key_size, u32 value_size,
                               u32 max_entries, u32 flags, int btf_fd, u32 key_type,
                               u32 value_type)
{
    LIBBPF_OPTS(bpf_map_create_opts, opts, .map_flags = flags, .btf_fd = (u32)btf_fd,
                .btf_key_type_id = key_type, .btf_value_type_id = value_type);
    return bpf_map_create(type, name, key_size, value_size, max_entries, &opts);
}

/* Create a map as an existing one, BTF included, with another capacity. */
static int pw_map_create_like(int fd, const char *name, u32 max_entries)
{
    struct bpf_map_info info = {};
    u32 length = sizeof(info);
    LIBBPF_OPTS(bpf_map_create_opts, opts);
    int btf_fd = -1, made;

    if (bpf_obj_get_info_by_fd(fd, &info, &length))
        return -errno;
    opts.map_flags = info.map_flags;
    if (info.btf_id) {
        btf_fd = bpf_btf_get_fd_by_id(info.btf_id);
        if (btf_fd < 0)
            return -errno;
        opts.btf_fd = btf_fd;
        opts.btf_key_type_id = info.btf_key_type_id;
        opts.btf_value_type_id = info.btf_value_type_id;
    }
    made = bpf_map_create(info.type, name, info.key_size, info.value_size, max_entries, &opts);
    if (btf_fd >= 0) {
        int saved = errno;

        close(btf_fd);
        errno = saved;
    }
    return made;
}

static int write_members(const struct btf *btf, const struct btf_type *type, char *out, size_t size)
{
    const struct btf_member *member = btf_members(type);
    size_t used = 0;
    int i;

    for (i = 0; i < btf_vlen(type); i++, member++) {
        int written = snprintf(out + used, size - used, "%s %u %lld\n",
                               btf__name_by_offset(btf, member->name_off),
                               btf_member_bit_offset(type, i) / 8,
                               (long long)btf__resolve_size(btf, member->type));

        if (written < 0 || (size_t)written >= size - used) {
            errno = ENOSPC;
            return -ENOSPC;
        }
        used += written;
    }
    return 0;
}

/* Write one line "name offset size" for each member of a map's key or value, as the kernel's BTF
 * has it. A plain number gives no line.
 */
static int pw_map_layout(int fd, int of_value, char *out, size_t size)
{
    struct bpf_map_info info = {};
    const struct btf_type *type;
    u32 length = sizeof(info);
    struct btf *btf;
    int err = 0, id;

    out[0] = 0;
    if (bpf_obj_get_info_by_fd(fd, &info, &length))
        return -errno;
    id = of_value ? info.btf_value_type_id : info.btf_key_type_id;
    if (!info.btf_id || !id) {
        errno = ENODATA;
        return -ENODATA;
    }
    btf = btf__load_from_kernel_by_id(info.btf_id);
    if (!btf)
        return -errno;
    type = btf__type_by_id(btf, id);
    while (type && (btf_is_mod(type) || btf_is_typedef(type)))
        type = btf__type_by_id(btf, type->type);
    if (type && btf_is_struct(type))
        err = write_members(btf, type, out, size);
    btf__free(btf);
    return err;
}

static int pw_is_bpffs(const char *path)
{
    struct statfs found;

    if (statfs(path, &found))
        return -errno;
    return (u32)found.f_type == BPF_FS_MAGIC;
}

static int pw_mount_bpffs(const char *path)
{
    return mount("bpf", path, "bpf", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=0700");
}

static int pw_lookup_batch(int fd, void *in_batch, void *out_batch, void *keys, void *values,
                           u32 *count, u64 elem_flags)
{
    LIBBPF_OPTS(bpf_map_batch_opts, opts, .elem_flags = elem_flags);
    return bpf_map_lookup_batch(fd, in_batch, out_batch, keys, values, count, &opts);
}

static int pw_update_batch(int fd, const void *keys, const void *values, u32 *count,
                           u64 elem_flags)
{
    LIBBPF_OPTS(bpf_map_batch_opts, opts, .elem_flags = elem_flags);
    return bpf_map_update_batch(fd, keys, values, count, &opts);
}

static int pw_delete_batch(int fd, const void *keys, u32 *count)
{
    LIBBPF_OPTS(bpf_map_batch_opts, opts);
    return bpf_map_delete_batch(fd, keys, count, &opts);
}

static int pw_map_info(int fd, struct pw_map_info *out)
{
    struct bpf_map_info info = {};
    u32 length = sizeof(info);
    int err = bpf_obj_get_info_by_fd(fd, &info, &length);

    if (err)
        return err;
    out->type = info.type;
    out->id = info.id;
    out->key_size = info.key_size;
    out->value_size = info.value_size;
    out->max_entries = info.max_entries;
    out->map_flags = info.map_flags;
    memcpy(out->name, info.name, sizeof(out->name));
    return 0;
}

static int pw_prog_info(int fd, struct pw_prog_info *out)
{
    struct bpf_prog_info info = {};
    u32 length = sizeof(info);
    int err = bpf_obj_get_info_by_fd(fd, &info, &length);

    if (err)
        return err;
    out->type = info.type;
    out->id = info.id;
    out->verified_insns = info.verified_insns;
    memcpy(out->tag, info.tag, sizeof(out->tag));
    memcpy(out->name, info.name, sizeof(out->name));
    out->load_time_ns = info.load_time;
    return 0;
}

/* The ids of the maps that a program uses; gives how many there are, at most `room` of which are told. */
static int pw_prog_maps(int fd, u32 *ids, u32 room)
{
    struct bpf_prog_info info = {};
    u32 length = sizeof(info);
    int err;

    info.map_ids = (unsigned long)ids;
    info.nr_map_ids = room;
    err = bpf_obj_get_info_by_fd(fd, &info, &length);
    return err ? err : (int)info.nr_map_ids;
}

/* BPF_PROG_TEST_RUN. With use_skb the fields of __sk_buff that one may choose go in and out. */
static int pw_run(int fd, struct pw_run *run)
{
    struct __sk_buff in = {}, out = {};
    LIBBPF_OPTS(bpf_test_run_opts, opts, .repeat = (int)run->repeat);
    int err;

    if (run->use_skb) {
        in.mark = run->mark;
        in.priority = run->priority;
        in.ingress_ifindex = run->ingress_ifindex;
        in.ifindex = run->ifindex;
        in.gso_size = run->gso_size;
        in.gso_segs = run->gso_segs;
        in.wire_len = run->wire_len;
        memcpy(in.cb, run->cb, sizeof(in.cb));
        opts.data_in = run->data_in;
        opts.data_size_in = run->data_size_in;
        opts.data_out = run->data_out;
        opts.data_size_out = run->data_size_out;
        opts.ctx_in = &in;
        opts.ctx_size_in = sizeof(in);
        opts.ctx_out = &out;
        opts.ctx_size_out = sizeof(out);
    } else if (run->ctx_size_in) {
        opts.ctx_in = run->ctx_in;
        opts.ctx_size_in = run->ctx_size_in;
    }
    err = bpf_prog_test_run_opts(fd, &opts);
    if (err)
        return err;
    run->data_size_out = opts.data_size_out;
    run->retval = opts.retval;
    run->duration_ns = opts.duration;
    run->mark = out.mark;
    run->priority = out.priority;
    memcpy(run->cb, out.cb, sizeof(out.cb));
    return 0;
}

struct pw_drain {
    struct ring_buffer *ring;
    size_t record_size, capacity, used;
    u64 odd;
    char *bytes;
};

static int take_record(void *context, void *data, size_t size)
{
    struct pw_drain *drain = context;

    if (size < drain->record_size) {
        drain->odd++;
        return 0;
    }
    memcpy(drain->bytes + drain->used, data, drain->record_size);
    drain->used += drain->record_size;
    /* libbpf counts the sample of a failing callback as consumed: stop after the one that fills. */
    return drain->used + drain->record_size > drain->capacity ? -ENOSPC : 0;
}

static struct pw_drain *pw_drain_open(int map_fd, size_t record_size, size_t records)
{
    struct pw_drain *drain = calloc(1, sizeof(*drain));

    if (!drain)
        return NULL;
    drain->record_size = record_size;
    drain->capacity = record_size * records;
    drain->bytes = malloc(drain->capacity);
    drain->ring = drain->bytes ? ring_buffer__new(map_fd, take_record, drain, NULL) : NULL;
    if (!drain->ring) {
        int saved = errno;

        free(drain->bytes);
        free(drain);
        errno = saved;
        return NULL;
    }
    return drain;
}

static void pw_drain_close(struct pw_drain *drain)
{
    ring_buffer__free(drain->ring);
    free(drain->bytes);
    free(drain);
}

static int pw_drain_epoll_fd(const struct pw_drain *drain)
{
    return ring_buffer__epoll_fd(drain->ring);
}

static int pw_drain_take(struct pw_drain *drain)
{
    int err;

    drain->used = 0;
    err = ring_buffer__consume(drain->ring);
    if (err == -ENOSPC)
        return 1;
    if (err < 0) {
        errno = -err;
        return err;
    }
    return 0;
}

static const char *pw_drain_bytes(const struct pw_drain *drain, size_t *size, u64 *odd)
{
    *size = drain->used;
    *odd = drain->odd;
    return drain->bytes;
}

static int pw_membarrier(int command) { return (int)syscall(SYS_membarrier, command, 0, 0); }
"""

ffibuilder = FFI()
ffibuilder.cdef(TYPES + DECLARATIONS)
ffibuilder.set_source(
    "podwire.kernel._libbpf",
    INCLUDES + TYPES + SOURCE,
    libraries=["bpf"],
    extra_compile_args=["-O2", "-Wall", "-Wextra", "-Wno-unused-parameter"],
    py_limited_api=True,
)


def main() -> int:
    """Compile the extension and put it beside this file."""
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory(prefix="podwire-libbpf-") as scratch:
        built = Path(ffibuilder.compile(tmpdir=scratch, verbose=False))
        target = here / built.name
        # A rename: a process that has the old file mapped keeps it, and no reader sees half a file.
        fresh = target.with_suffix(".new")
        shutil.copyfile(built, fresh)
        fresh.replace(target)
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
