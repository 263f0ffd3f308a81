/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* verdict.h: may this peer open this flow, as far as one endpoint has a say? Knows rows, never packets or entries.
 *
 * Three families of rows may cover a question, each found by its longest match: the peer's identity, the CIDR that its
 * address is in, everybody. The highest precedence decides; among equals a denial, then the earlier family. Where none
 * covers it, the direction's default holds.
 */
#ifndef PODWIRE_VERDICT_H
#define PODWIRE_VERDICT_H

#include <podwire/flow.h>

#define PW_POLICY_QUESTION_BITS 96

/* What a policy is asked: always about the first packet of a flow, seen from the endpoint. */
struct pw_question {
	__u32 peer_identity;
	__be16 port_be; /* destination port; ICMP: type and code */
	__u8 protocol;
	__u8 direction;	    /* enum pw_direction */
	__u8 peer_addr[16]; /* as the pod sees it; read where the row has a CIDR flag */
};

struct pw_verdict {
	__u32 rule;
	bool allowed;
	__u8 said; /* enum pw_said */
};

static __always_inline bool outranks(const struct pw_policy_value *row,
				     const struct pw_policy_value *best)
{
	if (!best || row->precedence != best->precedence)
		return !best || row->precedence > best->precedence;
	return row->verdict != PW_POLICY_ALLOW && best->verdict == PW_POLICY_ALLOW;
}

/* Asks one family; true = nobody else is to be asked. */
static __always_inline bool ask_family(struct pw_policy_key *key, __u32 identity,
				       const struct pw_policy_value **best)
{
	const struct pw_policy_value *row;

	key->identity = identity;
	row = bpf_map_lookup_elem(&pw_policy, key);
	if (!row)
		return false;
	if (outranks(row, *best))
		*best = row;
	return row->flags & PW_POLICY_FINAL;
}

/* 0 = no rule speaks of the peer's address. */
static __always_inline __u32 cidr_identity(const struct pw_question *question)
{
	struct pw_prefix_key key = {.prefix_bits = 128};
	const __u32 *identity;

	copy_address(key.addr, question->peer_addr);
	identity = bpf_map_lookup_elem(&pw_cidrs, &key);
	if (!identity || !*identity)
		return 0;
	return question->peer_identity == PW_IDENTITY_WORLD ? *identity | PW_CIDR_WORLD_BIT
							    : *identity;
}

/* The row that decides, NULL = none. `cidr`: the identity of the peer's address, 0 = no such rules. */
static __always_inline const struct pw_policy_value *
ask_slot(__u32 slot, const struct pw_question *question, __u32 cidr)
{
	const struct pw_policy_value *best = NULL;
	struct pw_policy_key key = {
		.prefix_bits = PW_POLICY_QUESTION_BITS,
		.slot = slot,
		.direction = question->direction,
		.protocol = question->protocol,
		.port_be = question->port_be,
	};

	if (ask_family(&key, question->peer_identity, &best) ||
	    (cidr && ask_family(&key, cidr, &best)))
		return best;
	ask_family(&key, 0, &best);
	return best;
}

/* By the slot that the row names, else by the default of the direction. */
static __always_inline void ask_rules(const struct pw_config_value *row,
				      const struct pw_question *question,
				      struct pw_verdict *verdict)
{
	bool inwards = question->direction == PW_INGRESS;
	bool audited = row->flags & PW_CONFIG_AUDIT;
	const struct pw_policy_value *found = NULL;
	__u32 by_address = inwards ? PW_CONFIG_CIDR_INGRESS : PW_CONFIG_CIDR_EGRESS;

	if (row->slot) {
		__u32 cidr = row->flags & by_address ? cidr_identity(question) : 0;

		verdict->said |= PW_SAID_BY_SLOT;
		found = ask_slot(row->slot, question, cidr);
	}
	if (found) {
		verdict->rule = found->rule;
		verdict->allowed = found->verdict == PW_POLICY_ALLOW;
		audited |= found->flags & PW_POLICY_AUDIT;
	} else {
		verdict->rule = inwards ? row->default_rule_ingress : row->default_rule_egress;
		verdict->allowed =
			!(row->flags & (inwards ? PW_CONFIG_DENY_INGRESS : PW_CONFIG_DENY_EGRESS));
	}
	if (!verdict->allowed && audited) {
		verdict->allowed = true;
		verdict->said |= PW_SAID_AUDIT;
	}
}

/* An endpoint may always talk to itself, and the host may come in where the row says so (probes). */
PW_CHECKED_ALONE int policy_verdict(const struct pw_config_value *row,
				    const struct pw_question *question, struct pw_verdict *verdict)
{
	if (!row || !question || !verdict)
		return 0;
	__builtin_memset(verdict, 0, sizeof(*verdict));
	verdict->allowed = true;
	verdict->said = PW_SAID_ANEW;
	if (question->peer_identity == PW_IDENTITY_SELF)
		return 0;
	if (question->direction == PW_INGRESS && question->peer_identity == PW_IDENTITY_HOST &&
	    row->flags & PW_CONFIG_HOST_ALLOWED)
		return 0;
	ask_rules(row, question, verdict);
	return 0;
}

#endif
