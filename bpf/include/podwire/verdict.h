/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* verdict.h: may this peer open this flow, as far as one endpoint has a say? Knows rows, never packets or entries. */
#ifndef PODWIRE_VERDICT_H
#define PODWIRE_VERDICT_H

#include <podwire/flow.h>

/* What a policy is asked: always about the first packet of a flow, seen from the endpoint. */
struct pw_question {
	__u32 peer_identity;
	__be16 port_be; /* destination port; ICMP: type and code */
	__u8 protocol;
	__u8 direction; /* enum pw_direction */
};

struct pw_verdict {
	__u32 rule;
	bool allowed;
	bool audited; /* denied, but the endpoint is only watched */
};

/* The default of the direction; the host may always come in where the row says so (probes). */
static __always_inline struct pw_verdict policy_verdict(const struct pw_config_value *row,
							const struct pw_question *question)
{
	struct pw_verdict verdict = {.allowed = true};
	bool inwards = question->direction == PW_INGRESS;

	if (inwards && question->peer_identity == PW_IDENTITY_HOST &&
	    row->flags & PW_CONFIG_HOST_ALLOWED)
		return verdict;
	verdict.rule = inwards ? row->default_rule_ingress : row->default_rule_egress;
	if (row->flags & (inwards ? PW_CONFIG_DENY_INGRESS : PW_CONFIG_DENY_EGRESS)) {
		verdict.audited = row->flags & PW_CONFIG_AUDIT;
		verdict.allowed = verdict.audited;
	}
	return verdict;
}

#endif
