/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* maps.h: every map that more than one program uses.
 *
 * What the loader owes the programs, in this order:
 * 1. Capacities of pw_endpoints, pw_config, pw_usage and pw_ipcache may be chosen before the load. Every map is pinned
 *    under its own name; a pinned one is reused, never made again while a program uses it.
 * 2. pw_settings[0] is written before anything else, with a random hash_seed. The seed stays as long as the pin does.
 * 3. Each of the PW_CONNTRACK_SHARDS slots of pw_conntrack gets a hash of its own (BPF_F_NO_PREALLOC; key
 *    pw_conntrack_key, value pw_conntrack_value; capacity = conntrack_entries / PW_CONNTRACK_SHARDS), and slot 0 of
 *    pw_new_flows an LRU hash of such rows. A slot that is replaced has its rows copied: they would be forgotten. An
 *    empty slot remembers nothing. Behind the shards pw_shard_fill says how many rows one of them has room for.
 * 4. conntrack_gc_start is run once by a test run (any frame, repeat 1); running it again is harmless, and is how a
 *    newer collector takes over. From then on collection needs neither the agent nor a pin of the program; it lives as
 *    long as the pin of pw_ct_timer.
 * 5. For an endpoint: pw_usage[instance], then the guard row in pw_config (flags 0), then device and filters, then
 *    pw_endpoints, then the row with PW_CONFIG_OPEN, written with BPF_F_LOCK. When it goes: the row's flags to 0
 *    (BPF_F_LOCK), pw_endpoints and pw_config rows deleted, then pw_usage[instance]: what it had in conntrack is
 *    collected within one round, and no number is used twice.
 * 6. A row whose policy_revision is raised makes every flow of the endpoint be judged again (rule 6).
 * 7. A slot of pw_policy is filled before a row names it, and emptied when no row has named it for an RCU grace period
 *    (rule 17). A prefix of pw_cidrs changes what rules say too: revisions are raised after it.
 * 8. A back end has its row before a slot names it, a slot its row before a service counts it, and the rows go the other
 *    way round. PW_SETTINGS_SERVICES is set when the first service has its rows.
 */
#ifndef PODWIRE_MAPS_H
#define PODWIRE_MAPS_H

#include <bpf/bpf_helpers.h>

#include <podwire/abi.h>

/* 0 -> knobs of the node. Written by the agent, read for each flow. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pw_settings);
} pw_settings SEC(".maps");

/* address -> host device of the pod that has it. Written by the agent; read by from_pod to find local targets, and
 * never believed alone: the target's config row must carry the address too. Two addresses for each of 4096 pods.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, struct pw_endpoint_key);
	__type(value, struct pw_endpoint_value);
} pw_endpoints SEC(".maps");

/* index of a host device -> all that the programs know of its endpoint. Written by the agent, live rows in place under
 * the lock (rule 20); copied once per packet. Kernels limit a device's ports long before 4096.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct pw_config_value);
} pw_config SEC(".maps");

/* prefix -> identity, and how to reach it. Written by the agent. Covers the cluster's CIDRs, so that a miss means the
 * world (rule 10). Sized for 5,000 nodes with 100 pods each; memory is taken as rows come.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 512000);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_prefix_key);
	__type(value, struct pw_ipcache_value);
} pw_ipcache SEC(".maps");

/* slot, identity, direction, protocol, port -> what is said about them. Written by the agent, which counts its rows and
 * stops at a limit of its own, below this one; read once per family for each judgement. Within one family (the peer's
 * identity, a CIDR's, 0) each row holds the best rule that covers all of it, so the longest match is the answer.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1 << 20);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_policy_key);
	__type(value, struct pw_policy_value);
} pw_policy SEC(".maps");

/* prefix -> the identity by which rules about addresses name it, 0 = none. Written by the agent; read where a slot has
 * such rules.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_prefix_key);
	__type(value, __u32);
} pw_cidrs SEC(".maps");

/* rule -> how often it decided, on each CPU: judgements and the bytes of the packets they were about. What passes on
 * the word of an earlier judgement is counted by its flow. Rows are made by the programs and removed by the agent.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct pw_counter);
} pw_hits SEC(".maps");

/* number of a node -> its outer address. Written by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct pw_node_value);
} pw_nodes SEC(".maps");

/* outer address -> number of the node that it belongs to; a node may have several. Written by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 32768);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_endpoint_key);
	__type(value, __u32);
} pw_node_numbers SEC(".maps");

/* address, port and protocol of a service -> its list of back ends. Written by the agent, read by from_pod for flows
 * that nobody remembers. An address takes a row more than it has ports. Memory of rows is taken as they come, here and
 * below; the empty tables take 5 MB.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_service_key);
	__type(value, struct pw_service_value);
} pw_services SEC(".maps");

/* list and slot -> back end. Written by the agent; a slot beyond the list's length means nothing. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 131072);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_service_slot_key);
	__type(value, struct pw_service_slot_value);
} pw_service_list SEC(".maps");

/* number of a back end -> where it is. Written by the agent: a row is never changed, and its number never used twice. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 131072);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct pw_back_end_value);
} pw_back_ends SEC(".maps");

/* pod and place of a service with affinity -> the back end that the pod has. Written by the programs, emptied by the
 * collector. A pod has as many rows as there are places; rows for 128 pods that use all of them.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 128 * PW_AFFINITY_PLACES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_affinity_key);
	__type(value, struct pw_affinity_value);
} pw_affinity SEC(".maps");

/* What a slot of pw_conntrack holds: tuple -> connection. Written by the programs, emptied by the collector. No LRU, or
 * one port scan would erase a node's rights to reply (rule 4); memory is taken as rows come.
 */
struct pw_conntrack_shard {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2048);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(key_size, sizeof(struct pw_conntrack_key));
	__uint(value_size, sizeof(struct pw_conntrack_value));
};

/* shard -> hash of flows. 64 of them, so that the collector walks a small one at each tick. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, PW_CONNTRACK_SHARDS);
	__type(key, __u32);
	__array(values, struct pw_conntrack_shard);
} pw_conntrack SEC(".maps");

/* shard -> its rows, and behind the shards how many rows one has room for (0 = unknown). The agent writes the room, the
 * programs count what they insert, and the collector puts right what it finds otherwise.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PW_CONNTRACK_SHARDS + 1);
	__type(key, __u32);
	__type(value, __u32);
} pw_shard_fill SEC(".maps");

/* What slot 0 of pw_new_flows holds: tuple -> flow that is no connection yet. Written by the programs; new flows push
 * out new flows and nothing else. No row is ever deleted: its memory would be given to another flow under a reader.
 */
struct pw_new_flow_hash {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__uint(key_size, sizeof(struct pw_conntrack_key));
	__uint(value_size, sizeof(struct pw_conntrack_value));
};

/* 0 -> hash of new flows. A map of maps, so that its size can be changed under running programs. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct pw_new_flow_hash);
} pw_new_flows SEC(".maps");

/* Where the programs keep what first fragments tell: sets, chosen by what names the datagram, the newest one in front.
 * Each hook has sets of its own, so that the world, whose addresses may be forged, pushes out nothing that pods send;
 * and in a set one source address keeps no more than its share, so that a flood pushes out its own (rule 26): the two
 * addresses of a pod together keep half of a set at most.
 */
#define PW_FRAGMENT_HOOKS 4 /* from_netdev leaves fragments to the stack */
#define PW_FRAGMENT_SETS  256
#define PW_FRAGMENT_WAYS  8
#define PW_FRAGMENT_SHARE 2

struct pw_fragment {
	__u8 saddr[16];
	__u8 daddr[16];
	__u32 instance;
	__u32 id;	    /* IPv4 id or IPv6 fragment identification, as on the wire */
	__u8 wire_protocol; /* 0 for IPv6 (RFC 8200 4.5: not part of what names a packet) */
	__u8 protocol;	    /* later IPv6 fragments do not tell it */
	__u8 icmp_type;
	__u8 pad;
	__be16 sport_be;
	__be16 dport_be;
};

struct pw_fragment_set {
	struct bpf_spin_lock lock;
	__u32 pad;
	struct pw_fragment ways[PW_FRAGMENT_WAYS];
};

/* hook and set -> the ports of datagrams in pieces. Written and read by the programs alone. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PW_FRAGMENT_HOOKS *PW_FRAGMENT_SETS);
	__type(key, __u32);
	__type(value, struct pw_fragment_set);
} pw_fragments SEC(".maps");

/* Cell, chosen by pod, protocol and port -> tag of these, and when a datagram by that port took the stack last
 * (stack_ports.h). Written and read by the programs alone. Only pods whose endpoint ids differ by a multiple of
 * PW_STACK_PODS share cells: a pod that asks by many ports displaces its own marks, and those of such pods.
 */
#define PW_STACK_PODS  256
#define PW_STACK_CELLS 512 /* of each */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PW_STACK_PODS *PW_STACK_CELLS);
	__type(key, __u32);
	__type(value, __u64);
} pw_stack_cells SEC(".maps");

/* instance -> how much of the shared things it uses. The row is made and removed by the agent, counted by the programs
 * and the collector.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct pw_usage_value);
} pw_usage SEC(".maps");

/* 0 -> how much was told of packets that belong to no endpoint. Counted by the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pw_usage_value);
} pw_strangers SEC(".maps");

/* index made of hook, reason and path -> packets and bytes, on each CPU. Written by the programs, read by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PW_METRICS_HOOKS *PW_METRICS_REASONS *PW_METRICS_PATHS);
	__type(key, __u32);
	__type(value, struct pw_counter);
} pw_metrics SEC(".maps");

/* Stream of struct pw_event to the agent: drops always, passes where asked for. 10,000 events; when it is full they are
 * counted as lost, never waited for.
 */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} pw_events SEC(".maps");

#ifdef PW_TEST_BUILD
/* 0 -> what the last packet came to. Written by the programs, read by the packet tests. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pw_decision);
} pw_decision SEC(".maps");

/* 0 -> the tunnel key of the next packet. Written by the packet tests, read by from_overlay. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pw_tunnel_end);
} pw_tunnel_key SEC(".maps");
#endif

#endif
