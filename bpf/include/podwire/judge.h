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

#include <podwire/conntrack.h>
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

static __always_inline bool is_midstream(const struct pw_flow *flow)
{
	return flow->key.protocol == IPPROTO_TCP && !opens_tcp(flow->tcp_flags);
}

/* TCP in mid-stream may be the answer of a flow whose entry is lost: what its own direction denies is judged once more
 * as that (rule 3).
 */
static __always_inline bool judge_reversed(const struct pw_flow *flow, struct pw_match *match,
					   const struct pw_config_value *row,
					   struct pw_question *question, struct pw_verdict *verdict)
{
	question->direction = !question->direction;
	question->port_be = flow->key.sport_be;
	*verdict = policy_verdict(row, question);
	if (!verdict->allowed)
		return false;
	match->reply = true;
	match->direction = question->direction;
	match->port_be = question->port_be;
	return true;
}

static __noinline int judge_anew(struct pw_flow *flow, const struct pw_config_value *row,
				 struct pw_match *match, __u32 peer_identity)
{
	struct pw_question question = {
		.peer_identity = peer_identity,
		.port_be = match->port_be,
		.protocol = match->protocol,
		.direction = match->direction,
	};
	struct pw_verdict verdict = policy_verdict(row, &question);
	struct pw_conntrack_value *entry = match->entry;
	bool allowed = verdict.allowed;

	flow->rule = verdict.rule;
	if (!entry && is_midstream(flow)) {
		match->picked_up = true;
		if (!allowed)
			allowed = judge_reversed(flow, match, row, &question, &verdict);
	}
	flow->audited = verdict.audited;
	flow->judged_anew = true;
	if (entry) {
		entry->rule = verdict.rule;
		*judgement_of(entry) = judgement(
			allowed ? row->policy_revision : ~row->policy_revision, peer_identity);
	}
	return allowed ? 0 : PW_DROP_POLICY;
}

/* Asks one endpoint about the packet. `peer_identity` is that of the other end as it is now. */
static __always_inline int judge(struct pw_flow *flow, const struct pw_config_value *row,
				 struct pw_match *match, __u32 peer_identity)
{
	struct pw_conntrack_value *entry = match->entry;

	flow->instance = row->instance;
	flow->direction = flow->key.direction;
	if (entry && *judgement_of(entry) == judgement(row->policy_revision, peer_identity)) {
		flow->rule = entry->rule;
		return 0;
	}
	return judge_anew(flow, row, match, peer_identity);
}

#endif
