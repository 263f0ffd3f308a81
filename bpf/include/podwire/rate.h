/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* rate.h: how many new flows each second an endpoint is remembered for, and which of its openers has which part of it.
 *
 * Each bucket is one number: until when it is spent at its rate (the generic cell rate algorithm). Half a second may be
 * spent at once. Races only blur the limit.
 */
#ifndef PODWIRE_RATE_H
#define PODWIRE_RATE_H

#include <podwire/conntrack.h>

#define PW_RATE_SECOND_NS 1000000000U
#define PW_RATE_BURST_NS  500000000ULL
#define PW_OPENER_CHOICES 3 /* buckets that an address may spend */

static __always_inline bool spend(__u64 *until_ns, __u32 rate, __u64 now_ns)
{
	__u64 begin_ns = *until_ns;

	if (begin_ns < now_ns)
		begin_ns = now_ns;
	if (begin_ns - now_ns > PW_RATE_BURST_NS)
		return false;
	*until_ns = begin_ns + PW_RATE_SECOND_NS / rate;
	return true;
}

/* Whose address nobody can forge unseen: a program has seen the device or the tunnel that it came by. */
static __always_inline bool is_known_opener(__u32 identity)
{
	return identity != PW_IDENTITY_UNKNOWN && identity != PW_IDENTITY_WORLD &&
	       identity != PW_IDENTITY_UNMANAGED;
}

/* What one opener leaves to the others when it has spent all that they share. Seeded, so that nobody can choose whose
 * buckets it spends.
 */
static __always_inline bool spend_own(struct pw_usage_value *usage, const struct pw_flow *flow,
				      __u32 rate)
{
	struct pw_conntrack_key opener __attribute__((aligned(8))) = {};
	__u64 hash;

	copy_address(opener.saddr, flow->key.saddr);
	hash = seeded_hash(&opener);
	for (int i = 0; i < PW_OPENER_CHOICES; i++) {
		__u32 bucket = hash % PW_OPENER_BUCKETS;

		if (spend(&usage->opener_until_ns[bucket], rate / PW_OPENER_BUCKETS + 1,
			  flow->now_ns))
			return true;
		hash /= PW_OPENER_BUCKETS;
	}
	return false;
}

/* What an endpoint is remembered for each second is bounded, so that none pushes out another's new flows before they are
 * answered (rule 26). Flows that it opens, that known openers open to it, and that others do, have a rate each.
 */
static __always_inline bool spend_token(struct pw_usage_value *usage, const struct pw_flow *flow,
					__u32 opener_identity, __u32 rate)
{
	__u32 direction = flow->key.direction & 1;
	bool known = is_known_opener(opener_identity);
	__u32 share = direction == PW_EGRESS ? PW_SHARE_OPENED
		      : known		     ? PW_SHARE_KNOWN_OPENERS
					     : PW_SHARE_OTHER_OPENERS;

	if (!rate || spend(&usage->shared_until_ns[share], rate, flow->now_ns))
		return true;
	if (share == PW_SHARE_KNOWN_OPENERS && spend_own(usage, flow, rate))
		return true;
	usage->unremembered[direction] += 1;
	return false;
}

#endif
