// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* empty_cells: run by tests that give a node's maps to another one. Sets every row of the array to zero, for which the
 * calls of user space take 50 ms, and half a second under emulation.
 */
#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

/* Stands for pw_stack_cells (podwire/maps.h), however many rows that has. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} cells SEC(".maps");

static long empty_cell(void *map, const __u32 *key, __u64 *cell, void *context)
{
	(void)map;
	(void)key;
	(void)context;
	*cell = 0;
	return 0;
}

SEC("syscall")
int empty_cells(void *context)
{
	(void)context;
	bpf_for_each_map_elem(&cells, empty_cell, NULL, 0);
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
