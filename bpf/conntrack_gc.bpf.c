// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* conntrack_gc_start: run once by the loader (any frame); attached nowhere. Starts the timer that from then on collects
 * conntrack by itself (rule 4): one shard each tick, all of them in a round. The timer belongs to the pinned map
 * pw_ct_timer and keeps this program alive: it goes on without pin, agent or any process.
 * hand_over: run once by an agent that ends; moves flows that wait for an answer where a build of layout 2 looks.
 * pulse_start: run once by an agent that begins; starts a timer that ends with its process, however that ends. When the
 * collector misses it, it does what an agent that ends does.
 *
 * An entry that is over is marked on one round and deleted on the next one, if it is still over: so no program holds a
 * pointer to it any more when its memory is given to another flow. Entries of an instance without a row in pw_usage
 * are over at once: their endpoint is gone.
 */
#include <stdbool.h>

#include <linux/bpf.h>

#include <podwire/address.h>
#include <podwire/room.h>

#define PW_NS_PER_MS	 1000000ULL
#define PW_NS_PER_SECOND 1000000000ULL
#define PW_CLOCK	 1 /* CLOCK_MONOTONIC */

#define PW_HURRY	  10 /* times as fast */
#define PW_HURRY_FROM	  32 /* entries of one shard that are to go, */
#define PW_HURRY_PART	  4  /* and one of so many that are there */
#define PW_PRESSED_NS	  PW_NS_PER_SECOND
#define PW_PULSE_NS	  (100 * PW_NS_PER_MS)
#define PW_MISSED_NS	  (3 * PW_PULSE_NS)
#define PW_AFFINITY_MAX_S 86400ULL /* of a Service's timeoutSeconds */

/* Between two shards; a round of all 64 takes 6.4 s. */
const volatile __u32 pw_tick_ms = 100;

struct pw_ct_timer_value {
	struct bpf_timer timer;
	struct pw_collection state;
};

/* 0 -> the timer, and what the collection tells of itself. Written here alone; the agent reads it for its health. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pw_ct_timer_value);
} pw_ct_timer SEC(".maps");

struct pw_pulse_value {
	struct bpf_timer timer;
	__u64 last_ns;	 /* 0 = no agent has begun yet */
	__u64 missed_ns; /* since when the collector misses it */
};

/* 0 -> the timer that says that an agent is there. Never pinned, so that nobody but the agent holds a descriptor of it:
 * when the last one is closed the kernel cancels the timer.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pw_pulse_value);
} own_pulse SEC(".maps");

struct pw_walk {
	__u64 now_ns;
	__u64 boot_ns;
	__u32 brief_room; /* of each endpoint */
	__u32 over;	  /* entries that are to go */
	__u32 examined;
	__u32 removed;
};

static __always_inline bool is_over(const struct pw_conntrack_value *entry,
				    const struct pw_usage_value *usage, __u64 now_ns)
{
	__u64 age_ns = now_ns - entry->last_seen_ns;

	if (!usage || entry->flags & PW_CONNTRACK_LEFT)
		return true;
	/* an entry may be younger than this walk */
	return (__s64)age_ns > (__s64)(entry->lifetime_s * PW_NS_PER_SECOND);
}

/* The other row of a translated flow. 0 = it is there, for this one, and lives. */
static __always_inline bool has_lost_its_flow(const struct pw_conntrack_key *key,
					      const struct pw_conntrack_value *entry,
					      const struct pw_usage_value *usage, __u64 now_ns)
{
	struct pw_conntrack_key other __attribute__((aligned(8))) = *key;
	const struct pw_conntrack_value *flow;
	void *shard;

	other.beside = 0;
	copy_address(other.daddr, entry->nat_addr);
	other.sport_be = entry->nat_sport_be;
	other.dport_be = entry->nat_dport_be;
	shard = find_shard(&other);
	flow = shard ? bpf_map_lookup_elem(shard, &other) : NULL;
	return !flow || flow->kind < PW_CONNTRACK_OF_BACK_END ||
	       flow->nat_sport_be != key->sport_be || flow->nat_dport_be != key->dport_be ||
	       !same_address(flow->nat_addr, key->daddr) || is_over(flow, usage, now_ns);
}

/* A brief flow has its whole time as long as its endpoint has room for more of them: what was answered or is closed
 * while three quarters are free, what waits for an answer while one is. A pod that floods presses out its own flows, no
 * other's. Where the shard gets full there is less room for each endpoint, so who has most presses out first.
 */
static __always_inline bool is_pressed_out(const struct pw_conntrack_value *entry,
					   const struct pw_usage_value *usage,
					   const struct pw_walk *walk)
{
	bool done = entry->tcp_state == PW_TCP_CLOSED || entry->flags & PW_CONNTRACK_REPLIED;
	__u32 quarter = walk->brief_room / 4;

	if (!usage || entry->charged != PW_CHARGE_BRIEF ||
	    (__s64)(walk->now_ns - entry->last_seen_ns) < (__s64)PW_PRESSED_NS)
		return false;
	return (__s32)usage->brief_flows > (__s32)(done ? quarter : walk->brief_room - quarter);
}

static __always_inline bool is_to_go(const struct pw_conntrack_key *key,
				     const struct pw_conntrack_value *entry,
				     const struct pw_usage_value *usage, const struct pw_walk *walk)
{
	if (is_over(entry, usage, walk->now_ns) || is_pressed_out(entry, usage, walk))
		return true;
	return entry->kind == PW_CONNTRACK_SERVICE &&
	       has_lost_its_flow(key, entry, usage, walk->now_ns);
}

static long visit_entry(void *shard, struct pw_conntrack_key *key, struct pw_conntrack_value *entry,
			struct pw_walk *walk)
{
	__u32 instance = key->instance;
	struct pw_usage_value *usage = bpf_map_lookup_elem(&pw_usage, &instance);

	walk->examined += 1;
	if (!is_to_go(key, entry, usage, walk)) {
		if (entry->flags & PW_CONNTRACK_EXPIRED)
			entry->flags &= ~PW_CONNTRACK_EXPIRED;
		return 0;
	}
	walk->over += 1;
	if (!(entry->flags & PW_CONNTRACK_EXPIRED)) {
		entry->flags |= PW_CONNTRACK_EXPIRED;
		return 0;
	}
	recharge(entry, usage, key->direction, PW_CHARGE_NONE);
	if (bpf_map_delete_elem(shard, key))
		return 0;
	walk->removed += 1;
	return 0;
}

static __always_inline __u32 brief_room(__u32 shard)
{
	__u32 zero = 0;
	const struct pw_settings *settings = bpf_map_lookup_elem(&pw_settings, &zero);

	return settings ? shrink_quota(settings->conntrack_quota, shard) / PW_BRIEF_PART : ~0U / 2;
}

static __always_inline __u32 read_rows(__u32 shard)
{
	const __u32 *rows = bpf_map_lookup_elem(&pw_shard_fill, &shard);

	return rows ? *rows : 0;
}

/* Where much is to go much more comes: then a round takes 0.64 s, and costs as much as it collects. */
static __always_inline __u64 next_tick_ns(const struct pw_walk *walk)
{
	__u32 tick_ms = pw_tick_ms;

	if (walk->over >= PW_HURRY_FROM && walk->over >= walk->examined / PW_HURRY_PART)
		tick_ms = tick_ms / PW_HURRY ?: 1;
	return tick_ms * PW_NS_PER_MS;
}

/* No pod has it any more, or no service keeps a back end for so long. */
static long visit_affinity(void *rows, struct pw_affinity_key *key, struct pw_affinity_value *value,
			   struct pw_walk *walk)
{
	__u32 instance = key->instance;

	if (!bpf_map_lookup_elem(&pw_usage, &instance) ||
	    (__s64)(walk->boot_ns - value->last_ns) > (__s64)(PW_AFFINITY_MAX_S * PW_NS_PER_SECOND))
		bpf_map_delete_elem(rows, key);
	return 0;
}

/* A flow that finds no room stays where it is, and so does its row: its memory would be given to another flow. */
static long hand_flow_over(void *rows, struct pw_conntrack_key *key,
			   struct pw_conntrack_value *entry, struct pw_walk *walk)
{
	struct pw_conntrack_key own __attribute__((aligned(8))) = *key;
	struct pw_conntrack_value copy = *entry;
	__u32 instance = own.instance, charge = PW_CHARGE_BRIEF;
	struct pw_usage_value *usage = bpf_map_lookup_elem(&pw_usage, &instance);

	(void)rows;
	if (!usage || is_over(&copy, usage, walk->now_ns))
		return 0;
	if (copy.flags & PW_CONNTRACK_CONNECTION)
		charge = PW_CHARGE_CONNECTION;
	if (!insert_connection(&own, &copy, usage, charge))
		entry->flags |= PW_CONNTRACK_LEFT;
	return 0;
}

static __always_inline void hand_flows_over(struct pw_walk *walk)
{
	__u32 zero = 0;
	void *rows = bpf_map_lookup_elem(&pw_new_flows, &zero);

	if (rows)
		bpf_for_each_map_elem(rows, hand_flow_over, walk, 0);
}

/* Missed twice, some time apart: where a machine has stood still, the collector may go before the pulse. */
static __always_inline bool is_absent(struct pw_pulse_value *pulse, __u64 now_ns)
{
	if (!pulse->last_ns || (__s64)(now_ns - pulse->last_ns) < (__s64)PW_MISSED_NS) {
		pulse->missed_ns = 0;
		return false;
	}
	if (!pulse->missed_ns)
		pulse->missed_ns = now_ns;
	return now_ns - pulse->missed_ns >= PW_MISSED_NS;
}

/* An agent that was killed has handed nothing over. In this order, as it would have. */
static __always_inline void replace_agent(struct pw_walk *walk)
{
	__u32 zero = 0;
	struct pw_pulse_value *pulse = bpf_map_lookup_elem(&own_pulse, &zero);
	struct pw_settings *settings = bpf_map_lookup_elem(&pw_settings, &zero);

	if (!pulse || !settings || settings->flags & PW_SETTINGS_UNATTENDED ||
	    !is_absent(pulse, walk->now_ns))
		return;
	__sync_fetch_and_or(&settings->flags, PW_SETTINGS_UNATTENDED);
	hand_flows_over(walk);
}

static int collect_shard(void *timers, __u32 *index, struct pw_ct_timer_value *value)
{
	__u32 number = value->state.ticks % PW_CONNTRACK_SHARDS, counted = read_rows(number);
	struct pw_walk walk = {.now_ns = bpf_ktime_get_coarse_ns(),
			       .boot_ns = bpf_ktime_get_boot_ns(),
			       .brief_room = brief_room(number)};
	void *shard = bpf_map_lookup_elem(&pw_conntrack, &number);

	(void)timers;
	(void)index;
	if (shard)
		bpf_for_each_map_elem(shard, visit_entry, &walk, 0);
	/* what is inserted meanwhile may count twice, until the next round */
	count_rows(number, walk.examined - walk.removed - counted);
	if (!number)
		bpf_for_each_map_elem(&pw_affinity, visit_affinity, &walk, 0);
	replace_agent(&walk);
	value->state.ticks += 1;
	value->state.last_tick_ns = walk.now_ns;
	value->state.examined += walk.examined;
	value->state.removed += walk.removed;
	bpf_timer_start(&value->timer, next_tick_ns(&walk), 0);
	return 0;
}

/* 0, or what the kernel says. It gives no memory for a timer at some moments: then the agent asks again. */
static __always_inline int arm_timer(struct bpf_timer *timer, void *map, void *callback,
				     __u64 after_ns)
{
	int failure = bpf_timer_init(timer, map, PW_CLOCK);

	/* Where it exists only the program behind it changes. */
	if (failure && failure != -EBUSY)
		return failure;
	failure = bpf_timer_set_callback(timer, callback);
	return failure ? failure : bpf_timer_start(timer, after_ns, 0);
}

SEC("tc")
int conntrack_gc_start(struct __sk_buff *skb)
{
	struct pw_ct_timer_value *value;
	__u32 zero = 0;

	(void)skb;
	value = bpf_map_lookup_elem(&pw_ct_timer, &zero);
	if (!value)
		return -1;
	return arm_timer(&value->timer, &pw_ct_timer, collect_shard, pw_tick_ms * PW_NS_PER_MS);
}

/* Run once by an agent that ends (any frame); attached nowhere. Puts new flows to where earlier builds look for flows.
 */
SEC("tc")
int hand_over(struct __sk_buff *skb)
{
	struct pw_walk walk = {.now_ns = bpf_ktime_get_coarse_ns()};

	(void)skb;
	hand_flows_over(&walk);
	return 0;
}

/* Takes the flag away that the collector has set where one CPU stood still and another did not. */
static int pulse(void *pulses, __u32 *index, struct pw_pulse_value *value)
{
	__u32 zero = 0;
	struct pw_settings *settings = bpf_map_lookup_elem(&pw_settings, &zero);

	(void)pulses;
	(void)index;
	value->last_ns = bpf_ktime_get_coarse_ns();
	if (settings && settings->flags & PW_SETTINGS_UNATTENDED)
		__sync_fetch_and_and(&settings->flags, ~PW_SETTINGS_UNATTENDED);
	bpf_timer_start(&value->timer, PW_PULSE_NS, 0);
	return 0;
}

/* Run once by an agent that begins (any frame); attached nowhere. */
SEC("tc")
int pulse_start(struct __sk_buff *skb)
{
	struct pw_pulse_value *value;
	__u32 zero = 0;
	int failure;

	(void)skb;
	value = bpf_map_lookup_elem(&own_pulse, &zero);
	if (!value)
		return -1;
	failure = arm_timer(&value->timer, &own_pulse, pulse, PW_PULSE_NS);
	/* An agent without a pulse counts as one that has none to miss. */
	value->last_ns = failure ? 0 : bpf_ktime_get_coarse_ns();
	return failure;
}

char _license[] SEC("license") = "Dual BSD/GPL";
