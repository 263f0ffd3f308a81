/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* service.h: a pod asks a service, and flow->key becomes the tuple to the back end that answers (rules 14, 15).
 *
 * A flow that a service translates has two rows in pw_conntrack and none in pw_new_flows, which evicts. The one under
 * the tuple as the pod has it (PW_CONNTRACK_SERVICE) only names the other tuple. The one under the tuple as the back
 * end has it (PW_CONNTRACK_OF_BACK_END) is the flow: it is judged, counted and aged, and the first one lives as long as
 * it does. Where the pod is its own back end that row is under the tuple of its answers (PW_CONNTRACK_OF_ITSELF): it
 * sees the service's address as its peer on both sides (rule 15). Nothing here changes the packet: that is left until
 * both sides have judged it.
 */
#ifndef PODWIRE_SERVICE_H
#define PODWIRE_SERVICE_H

#include <podwire/affinity.h>
#include <podwire/conntrack.h>
#include <podwire/identity.h>
#include <podwire/refuse.h>
#include <podwire/remember.h>

#define PW_PICKS	     8	   /* of a back end, and half of them with a source port of ours */
#define PW_SOURCE_PORT_FIRST 32768 /* as Linux chooses them */
#define PW_SOURCE_PORTS	     28232

static __always_inline bool has_services(void)
{
	__u32 zero = 0;
	const struct pw_settings *settings = bpf_map_lookup_elem(&pw_settings, &zero);

	return settings && settings->flags & PW_SETTINGS_SERVICES;
}

/* What begins a flow. A connection or association in mid-stream that nobody remembers is the stack's (rule 3). */
static __always_inline bool opens_flow(const struct pw_flow *flow)
{
	return flow->key.protocol == IPPROTO_UDP || flow->flags & PW_PACKET_SCTP_INIT ||
	       opens_tcp(flow->tcp_flags);
}

/* From here on the packet is one to the back end. */
static __always_inline void take_tuple(struct pw_flow *flow, const struct pw_conntrack_key *key,
				       __u32 service, __u32 back_end, __u16 beside, bool itself)
{
	struct pw_original *original = &flow->original;

	copy_address(original->addr, flow->key.daddr);
	original->sport_be = flow->key.sport_be;
	original->dport_be = flow->key.dport_be;
	original->service = service;
	original->back_end = back_end;
	original->beside = beside;
	original->itself = itself;
	original->translated = true;
	copy_address(flow->key.daddr, key->daddr);
	flow->key.sport_be = key->sport_be;
	flow->key.dport_be = key->dport_be;
}

/* A back end that is gone takes no datagram any more, and no connection or association that it has not accepted. */
static __always_inline bool may_go_on(const struct pw_flow *flow,
				      const struct pw_conntrack_value *translated)
{
	__u32 back_end = translated->backend;

	if (!opens_flow(flow))
		return true;
	if (flow->key.protocol == IPPROTO_TCP) {
		if (translated->tcp_state == PW_TCP_CLOSED)
			return false;
		if (translated->tcp_state > PW_TCP_OPENING)
			return true;
	}
	return !back_end || bpf_map_lookup_elem(&pw_back_ends, &back_end);
}

static __always_inline bool is_translation_of(const struct pw_flow *flow,
					      const struct pw_conntrack_value *translated)
{
	return translated && translated->kind >= PW_CONNTRACK_OF_BACK_END &&
	       same_address(translated->nat_addr, flow->key.daddr) &&
	       translated->nat_sport_be == flow->key.sport_be &&
	       translated->nat_dport_be == flow->key.dport_be;
}

/* By what was chosen for the flow's first packet. A row whose flow is over goes; of SCTP the flow, too, because the
 * next one to that back end has the same tuple.
 */
PW_CHECKED_ALONE int recall_back_end(struct pw_flow *flow, __u32 beside)
{
	struct pw_conntrack_key key __attribute__((aligned(8)));
	struct pw_conntrack_value *row, *translated;
	bool is_its_own;

	if (!flow)
		return PW_DROP_INTERNAL;
	key = flow->key;
	key.beside = beside;
	row = find_connection(&key, flow->now_ns);
	if (!row || row->kind != PW_CONNTRACK_SERVICE)
		return 0;
	key.beside = 0;
	copy_address(key.daddr, row->nat_addr);
	key.sport_be = row->nat_sport_be;
	key.dport_be = row->nat_dport_be;
	translated = find_connection(&key, flow->now_ns);
	is_its_own = is_translation_of(flow, translated);
	if (!is_its_own || !may_go_on(flow, translated)) {
		row->flags |= PW_CONNTRACK_LEFT;
		if (is_its_own && key.protocol == IPPROTO_SCTP)
			retire(translated, key.instance, PW_EGRESS);
		return 0;
	}
	row->last_seen_ns = flow->now_ns;
	take_tuple(flow, &key, row->service, row->backend, beside,
		   translated->kind == PW_CONNTRACK_OF_ITSELF);
	return 0;
}

/* The row is copied, and then found to be the one that was asked for: its memory may have been given to another. */
static __always_inline bool read_service(const struct pw_service_key *key,
					 struct pw_service_value *service)
{
	struct pw_service_value *live = bpf_map_lookup_elem(&pw_services, key);

	if (!live)
		return false;
	bpf_spin_lock(&live->lock);
	__builtin_memcpy(&service->service, &live->service,
			 sizeof(*service) - offsetof(struct pw_service_value, service));
	bpf_spin_unlock(&live->lock);
	return same_address(service->addr, key->addr) && service->port_be == key->port_be &&
	       service->protocol == key->protocol;
}

/* What goes to another service's address would be translated a second time by the stack, behind the verdict. */
static __always_inline bool is_of_service(const void *address)
{
	struct pw_service_key key = {};

	copy_address(key.addr, address);
	return bpf_map_lookup_elem(&pw_services, &key);
}

/* Fills in the back end that stands in a slot; 0 = there is none. As dear for one service as for thousands. */
static __always_inline __u32 read_back_end(__u32 service, __u32 slot, struct pw_conntrack_key *key)
{
	struct pw_service_slot_key at = {.service = service, .slot = slot};
	const struct pw_service_slot_value *found = bpf_map_lookup_elem(&pw_service_list, &at);
	const struct pw_back_end_value *back_end;
	struct pw_service_slot_value value;
	__u32 number;

	if (!found)
		return 0;
	value = *(const volatile struct pw_service_slot_value *)found;
	if (value.service != service)
		return 0;
	number = value.back_end;
	back_end = bpf_map_lookup_elem(&pw_back_ends, &number);
	if (!back_end)
		return 0;
	copy_address(key->daddr, back_end->addr);
	key->dport_be = back_end->port_be;
	barrier();
	return back_end->back_end == number ? number : 0;
}

/* Turns the tuple to a back end into that of its answers, where the pod is the back end: from its port to the service.
 */
static __always_inline void turn_to_itself(const struct pw_flow *flow, struct pw_conntrack_key *key)
{
	key->sport_be = key->dport_be;
	key->dport_be = flow->key.sport_be;
	copy_address(key->daddr, flow->key.daddr);
}

/* The two rows of a flow have two keys. */
static __always_inline bool has_same_ports(const struct pw_conntrack_key *key,
					   const struct pw_conntrack_key *other)
{
	return key->sport_be == other->sport_be && key->dport_be == other->dport_be;
}

static __noinline bool is_free(struct pw_conntrack_key *key, __u64 now_ns)
{
	bool reply;
	const struct pw_conntrack_value *entry = find_either(key, now_ns, &reply);

	return !entry || entry->tcp_state == PW_TCP_CLOSED;
}

static __always_inline __be16 any_source_port(void)
{
	return bpf_htons(PW_SOURCE_PORT_FIRST + bpf_get_prandom_u32() % PW_SOURCE_PORTS);
}

/* One try: a back end, and if that does not help, a source port of ours, so that no two flows have one tuple (rule 14).
 * SCTP keeps its ports: its checksum covers all of the packet but its addresses. 0 = this is it, PW_DONE = it is left to
 * the stack, else why not.
 */
PW_CHECKED_ALONE int try_back_end(struct pw_flow *flow, __u32 service, __u32 slot, __u32 own_port)
{
	struct pw_conntrack_key key __attribute__((aligned(8)));
	__u32 back_end = 0;
	bool itself = false;

	if (!flow)
		return PW_DROP_INTERNAL;
	key = flow->key;
	if (service) {
		back_end = read_back_end(service, slot, &key);
		if (back_end && !key.dport_be)
			return PW_DONE;
		if (!back_end || is_of_service(key.daddr))
			return PW_DROP_NO_BACK_END;
		itself = has_address(&flow->row, key.daddr);
	}
	if (itself)
		turn_to_itself(flow, &key);
	if (own_port && key.protocol != IPPROTO_SCTP)
		*(itself ? &key.dport_be : &key.sport_be) = any_source_port();
	if ((itself && has_same_ports(&key, &flow->key)) || !is_free(&key, flow->now_ns))
		return PW_DROP_CONNTRACK_FULL;
	take_tuple(flow, &key, service, back_end, !service, itself);
	return 0;
}

/* `service` 0: the pod speaks to a back end itself, where a flow of a service has its ports. `kept`: the slot that
 * leads to the back end of last time, 0 = any will do.
 */
static __always_inline int pick_back_end(struct pw_flow *flow, __u32 service, __u32 back_ends,
					 __u32 kept)
{
	__u32 slot = bpf_get_prandom_u32();
	int reason = PW_DROP_NO_BACK_END;

	for (__u32 i = 0; i < PW_PICKS; i++) {
		__u32 any = back_ends ? (slot + i) % back_ends : 0;

		reason = try_back_end(flow, service, kept ?: any, !service || i >= PW_PICKS / 2);
		if (!reason || reason == PW_DONE)
			return reason;
		if (reason == PW_DROP_NO_BACK_END)
			kept = 0;
	}
	return reason;
}

/* No service takes an address from its owner: this host, which serves it itself (NodeLocal DNS, kube-proxy's mode ipvs),
 * another node, a pod.
 */
static __always_inline bool is_taken(const struct pw_flow *flow)
{
	const struct pw_ipcache_value *prefix;

	if (find_endpoint(flow->key.daddr))
		return true;
	prefix = find_prefix(flow->key.daddr);
	return prefix && prefix->identity != PW_IDENTITY_UNMANAGED &&
	       prefix->identity != PW_IDENTITY_WORLD;
}

/* Copies the row of the service that the packet asks. A service that is not known is none (PW_DONE); the other ports of
 * one that is known are refused.
 */
PW_CHECKED_ALONE int find_service(const struct pw_flow *flow, struct pw_service_value *service)
{
	struct pw_service_key key = {};

	if (!flow || !service)
		return PW_DROP_INTERNAL;
	copy_address(key.addr, flow->key.daddr);
	key.port_be = flow->key.dport_be;
	key.protocol = flow->key.protocol;
	if (!read_service(&key, service))
		return is_of_service(key.addr) && !is_taken(flow) ? PW_DROP_NO_SERVICE_PORT
								  : PW_DONE;
	if (is_taken(flow))
		return PW_DONE;
	return service->back_ends ? 0 : PW_DROP_NO_BACK_END;
}

PW_CHECKED_ALONE int choose_back_end(struct pw_flow *flow, __u32 beside)
{
	struct pw_service_value service = {};
	__u32 kept;
	int reason;

	if (!flow)
		return PW_DROP_INTERNAL;
	if (beside)
		return pick_back_end(flow, 0, 0, 0);
	reason = find_service(flow, &service);
	if (reason)
		return reason == PW_DONE ? 0 : reason;
	kept = service.affinity_s ? recall_affinity(flow, &service) : 0;
	reason = pick_back_end(flow, service.service, service.back_ends, kept);
	if (!reason && service.affinity_s)
		keep_affinity(flow, &service);
	return reason == PW_DONE ? 0 : reason;
}

/* What went to the stack and was never answered may have been sent before the service was known. */
static __always_inline bool is_unanswered(const struct pw_flow *flow,
					  const struct pw_conntrack_value *here)
{
	if (flow->here.reply || here->path != PW_PATH_STACK)
		return false;
	return flow->key.protocol == IPPROTO_TCP ? here->tcp_state == PW_TCP_OPENING
						 : !(here->flags & PW_CONNTRACK_REPLIED);
}

/* Most packets have an entry, which tells. */
static __always_inline bool may_be_of_service(const struct pw_flow *flow,
					      const struct pw_conntrack_value *here)
{
	if (here && here->kind == PW_CONNTRACK_OF_ITSELF)
		return opens_tcp(flow->tcp_flags);
	if (here && here->kind != PW_CONNTRACK_PLAIN)
		return opens_tcp(flow->tcp_flags) || !flow->here.reply;
	if (here && !begins_anew(flow, here) && !is_unanswered(flow, here))
		return false;
	return opens_flow(flow) && has_services();
}

/* `beside`: the flow's tuple is one that a translated flow has. */
static __always_inline int translate(struct __sk_buff *skb, struct pw_flow *flow, __u32 beside)
{
	int reason = recall_back_end(flow, beside);

	if (reason || flow->original.translated || !opens_flow(flow))
		return reason;
	reason = choose_back_end(flow, beside);
	if (reason == PW_DROP_NO_BACK_END || reason == PW_DROP_NO_SERVICE_PORT)
		refuse(skb, flow);
	return reason;
}

/* Inserts a row of a translated flow, over one whose flow is over; 0 = it is there. */
static __always_inline int insert_translated(const struct pw_conntrack_key *key,
					     const struct pw_conntrack_value *entry)
{
	struct pw_conntrack_value *old;
	__u32 number = shard_number(key);
	void *shard = bpf_map_lookup_elem(&pw_conntrack, &number);
	int failure;

	if (!shard)
		return -E2BIG;
	failure = bpf_map_update_elem(shard, key, entry, BPF_NOEXIST);
	if (!failure)
		count_rows(number, 1);
	if (failure != -EEXIST)
		return failure;
	old = bpf_map_lookup_elem(shard, key);
	if (!old || (old->kind != PW_CONNTRACK_SERVICE && is_live(old, entry->last_seen_ns) &&
		     old->tcp_state != PW_TCP_CLOSED))
		return -EBUSY;
	recharge(old, bpf_map_lookup_elem(&pw_usage, &key->instance), key->direction,
		 PW_CHARGE_NONE);
	*old = *entry;
	return 0;
}

/* The key as the pod has it. */
static __always_inline void fill_service_key(const struct pw_flow *flow,
					     struct pw_conntrack_key *key)
{
	*key = flow->key;
	key->beside = flow->original.beside;
	copy_address(key->daddr, flow->original.addr);
	key->sport_be = flow->original.sport_be;
	key->dport_be = flow->original.dport_be;
}

/* The row under the tuple as the pod has it. Its flow's other row says how long it lives (conntrack_gc). */
PW_CHECKED_ALONE int make_service_row(const struct pw_flow *flow)
{
	struct pw_conntrack_key key __attribute__((aligned(8)));
	struct pw_conntrack_value entry = {};
	const struct pw_original *original;

	if (!flow)
		return PW_DROP_INTERNAL;
	original = &flow->original;
	entry.kind = PW_CONNTRACK_SERVICE;
	entry.last_seen_ns = flow->now_ns;
	entry.lifetime_s = PW_LIFETIME_SERVICE_ROW;
	entry.service = original->service;
	entry.backend = original->back_end;
	copy_address(entry.nat_addr, flow->key.daddr);
	entry.nat_sport_be = flow->key.sport_be;
	entry.nat_dport_be = flow->key.dport_be;
	fill_service_key(flow, &key);
	entry.tag = tag_of(&key);
	return insert_translated(&key, &entry) ? PW_DROP_CONNTRACK_FULL : 0;
}

/* Translated flows that are no connections have a budget of their own, so that a pod that is never answered, or opens
 * and closes all the time, fills that. Where it gets short the collector is in a hurry.
 */
static __always_inline bool has_room(const struct pw_usage_value *usage, __u32 quota)
{
	return (__s32)usage->connections[PW_EGRESS] < (__s32)quota &&
	       (__s32)usage->brief_flows < (__s32)(quota / PW_BRIEF_PART + 1);
}

/* What is left of the quota where its two rows would be. `key` is overwritten. */
static __always_inline __u32 find_quota(const struct pw_flow *flow, struct pw_conntrack_key *key,
					__u32 quota)
{
	__u32 of_flow = shrink_quota(quota, shard_number(&flow->key)), of_service;

	fill_service_key(flow, key);
	of_service = shrink_quota(quota, shard_number(key));
	return of_flow < of_service ? of_flow : of_service;
}

/* The flow itself. Answers could not be translated back without its rows: without room for them there is no flow. */
PW_CHECKED_ALONE int make_translated(struct pw_flow *flow, const struct pw_match *match)
{
	struct pw_conntrack_key key __attribute__((aligned(8)));
	struct pw_conntrack_value entry;
	struct pw_settings *settings;
	struct pw_usage_value *usage;
	__u32 zero = 0;

	if (!flow || !match)
		return PW_DROP_INTERNAL;
	key = flow->key;
	usage = bpf_map_lookup_elem(&pw_usage, &key.instance);
	settings = bpf_map_lookup_elem(&pw_settings, &zero);
	if (!usage || !settings)
		return PW_DROP_INTERNAL;
	if (!has_room(usage, settings->conntrack_quota))
		return PW_DROP_CONNTRACK_QUOTA;
	if (!has_room(usage, find_quota(flow, &key, settings->conntrack_quota)))
		return PW_DROP_CONNTRACK_FULL;
	key = flow->key;
	if (opens_tcp(flow->tcp_flags) && !retire_reversed(&key, flow->now_ns))
		return PW_DROP_CONNTRACK_FULL;
	fill_entry(flow, match, &entry);
	*judgement_of(&entry) = judgement(flow->row.policy_revision, match->peer_identity);
	entry.kind = flow->original.itself ? PW_CONNTRACK_OF_ITSELF : PW_CONNTRACK_OF_BACK_END;
	entry.charged = PW_CHARGE_BRIEF;
	entry.service = flow->original.service;
	entry.backend = flow->original.back_end;
	copy_address(entry.nat_addr, flow->original.addr);
	entry.nat_sport_be = flow->original.sport_be;
	entry.nat_dport_be = flow->original.dport_be;
	if (insert_translated(&key, &entry))
		return PW_DROP_CONNTRACK_FULL;
	count_charge(usage, PW_EGRESS, PW_CHARGE_BRIEF, 1);
	return 0;
}

/* A flow that has found no room for its other row leaves nothing that is charged. */
static __always_inline void forget_translated(const struct pw_flow *flow)
{
	struct pw_conntrack_value *row = find_connection(&flow->key, flow->now_ns);
	__u32 instance = flow->key.instance;

	if (!row)
		return;
	row->flags |= PW_CONNTRACK_LEFT;
	recharge(row, bpf_map_lookup_elem(&pw_usage, &instance), PW_EGRESS, PW_CHARGE_NONE);
}

/* As remember() for the sender's side; a flow that a service translates has two rows. */
static __always_inline int remember_sender(struct pw_flow *flow, struct pw_conntrack_value *here)
{
	int reason;

	if (!flow->original.translated || (here && !begins_anew(flow, here)))
		return remember(flow, &flow->row, &flow->here, here);
	if (here)
		retire(here, flow->key.instance, PW_EGRESS);
	reason = make_translated(flow, &flow->here);
	if (reason)
		return reason;
	reason = make_service_row(flow);
	if (reason)
		forget_translated(flow);
	return reason;
}

#endif
