/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* judge.h: one endpoint's say about a packet: by what it remembers, else by its policy (rules 3, 5, 6).
 *
 * An entry carries the judgement it was made under: policy revision and peer identity. As long as both hold, no policy
 * is asked. Otherwise the flow's first packet is judged again, whichever way the present one goes, or a denied stream
 * from the server would live on. A denial is remembered as a revision that never holds, so that it is judged anew each
 * time and both ways see it.
 */
#ifndef PODWIRE_JUDGE_H
#define PODWIRE_JUDGE_H

#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include <podwire/conntrack.h>
#include <podwire/icmp.h>
#include <podwire/verdict.h>

/* The two fields as one word, which is stored and compared whole: no CPU may see one of them without the other. */
static __always_inline __u64 judgement(__u32 policy_revision, __u32 peer_identity)
{
	__u32 fields[2] = {policy_revision, peer_identity};
	__u64 word;

	__builtin_memcpy(&word, fields, sizeof(word));
	return word;
}

static __always_inline volatile __u64 *judgement_of(struct pw_conntrack_value *entry)
{
	return (volatile __u64 *)&entry->policy_revision;
}

/* Neither opens a connection nor says that one is opened. A SYN-ACK without an entry is left out: nf_conntrack, which
 * has not seen its SYN either, calls it invalid.
 */
static __always_inline bool is_midstream(const struct pw_flow *flow)
{
	return flow->key.protocol == IPPROTO_TCP && !(flow->tcp_flags & PW_TCP_FLAG_SYN);
}

/* Counts that a rule decided. A rule's first hit makes its row; 0 is no rule. */
PW_CHECKED_ALONE int count_hit(__u32 rule, __u32 bytes)
{
	struct pw_counter *hits;

	if (!rule)
		return 0;
	hits = bpf_map_lookup_elem(&pw_hits, &rule);
	if (!hits) {
		struct pw_counter first = {};

		bpf_map_update_elem(&pw_hits, &rule, &first, BPF_NOEXIST);
		hits = bpf_map_lookup_elem(&pw_hits, &rule);
		if (!hits)
			return 0;
	}
	hits->packets += 1;
	hits->bytes += bytes;
	return 0;
}

/* The other end of the flow as the pod sees it. An ICMP error may come from between: who the packet was for that it
 * quotes, tells.
 */
static __always_inline bool read_peer_address(struct __sk_buff *skb, const struct pw_flow *flow,
					      const struct pw_match *match, __u8 *address)
{
	__u32 quoted = flow->transport_offset + sizeof(struct pw_icmp_header);
	bool outwards = flow->key.direction == PW_EGRESS;
	__be32 ipv4_be;

	if (!match->related || outwards) {
		copy_address(address, outwards ? flow->key.daddr : flow->key.saddr);
		return true;
	}
	if (flow->ethertype == ETH_P_IPV6)
		return !bpf_skb_load_bytes(skb, quoted + offsetof(struct ipv6hdr, daddr), address,
					   16);
	if (bpf_skb_load_bytes(skb, quoted + offsetof(struct iphdr, daddr), &ipv4_be,
			       sizeof(ipv4_be)))
		return false;
	map_ipv4(address, ipv4_be);
	return true;
}

/* An echo reply that answers nothing is asked about by its own type: its tuple has the request's. */
static __always_inline __be16 asked_port(const struct pw_flow *flow, const struct pw_match *match,
					 bool known)
{
	if (!known && flow->flags & PW_PACKET_ECHO_REPLY)
		return bpf_htons(flow->icmp_type << 8 | (bpf_ntohs(flow->key.sport_be) & 0xff));
	return match->port_be;
}

/* Are the rows of flows being moved? */
static __always_inline bool are_rows_moving(void)
{
	__u32 zero = 0;
	const struct pw_settings *settings = bpf_map_lookup_elem(&pw_settings, &zero);

	return settings && settings->flags & PW_SETTINGS_MOVING;
}

/* TCP in mid-stream may belong to a flow whose entry is lost (rule 3). A datagram may as long as a new build's rows are
 * still being filled: the answer to what was asked of the build before comes to programs that do not know the question.
 */
static __always_inline bool may_answer_lost(const struct pw_flow *flow)
{
	switch (flow->key.protocol) {
	case IPPROTO_TCP:
		return !opens_tcp(flow->tcp_flags);
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		return flow->flags & PW_PACKET_ECHO_REPLY && are_rows_moving();
	default:
		return are_rows_moving();
	}
}

/* What its own direction denies is judged once more as the answer of a flow whose entry is lost. */
static __always_inline void judge_reversed(const struct pw_flow *flow, struct pw_match *match,
					   const struct pw_config_value *row,
					   struct pw_question *question, struct pw_verdict *verdict)
{
	struct pw_verdict reversed = {};

	question->direction = !question->direction;
	question->port_be = flow->key.sport_be;
	policy_verdict(row, question, &reversed);
	if (!reversed.allowed || (reversed.said & PW_SAID_AUDIT && verdict->allowed))
		return;
	*verdict = reversed;
	match->reply = true;
	match->direction = question->direction;
	match->port_be = question->port_be;
}

PW_CHECKED_ALONE int judge_anew(struct __sk_buff *skb, struct pw_flow *flow,
				const struct pw_config_value *row, struct pw_match *match,
				struct pw_conntrack_value *entry)
{
	struct pw_question question = {};
	struct pw_verdict verdict = {};

	if (!flow || !row || !match)
		return PW_DROP_INTERNAL;
	question.peer_identity = match->peer_identity;
	question.port_be = asked_port(flow, match, entry);
	question.protocol = match->protocol;
	question.direction = match->direction;
	if (row->flags & (PW_CONFIG_CIDR_EGRESS | PW_CONFIG_CIDR_INGRESS) &&
	    !read_peer_address(skb, flow, match, question.peer_addr))
		return PW_DROP_INTERNAL;
	policy_verdict(row, &question, &verdict);
	if (!entry && may_answer_lost(flow)) {
		match->picked_up = is_midstream(flow);
		if (!verdict.allowed || verdict.said & PW_SAID_AUDIT)
			judge_reversed(flow, match, row, &question, &verdict);
	}
	flow->rule = verdict.rule;
	flow->said = entry ? verdict.said & ~PW_SAID_BY_SLOT : verdict.said | PW_SAID_NEW_FLOW;
	count_hit(verdict.rule, flow->packet_bytes);
	if (entry) {
		entry->rule = verdict.rule;
		*judgement_of(entry) =
			judgement(verdict.allowed ? row->policy_revision : ~row->policy_revision,
				  match->peer_identity);
	}
	return verdict.allowed ? 0 : PW_DROP_POLICY;
}

/* Asks one endpoint about the packet. match->peer_identity is that of the other end as it is now. */
static __always_inline int judge(struct __sk_buff *skb, struct pw_flow *flow,
				 const struct pw_config_value *row, struct pw_match *match,
				 struct pw_conntrack_value *entry)
{
	flow->instance = row->instance;
	flow->direction = flow->key.direction;
	if (entry &&
	    *judgement_of(entry) == judgement(row->policy_revision, match->peer_identity)) {
		flow->rule = entry->rule;
		flow->said = 0;
		return 0;
	}
	return judge_anew(skb, flow, row, match, entry);
}

#endif
