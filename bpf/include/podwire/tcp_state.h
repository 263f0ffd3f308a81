/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* tcp_state.h: how long an entry lives. For TCP by its state; the states serve nothing else, no packet is refused by
 * them, so that no window arithmetic is needed.
 */
#ifndef PODWIRE_TCP_STATE_H
#define PODWIRE_TCP_STATE_H

#include <linux/in.h>
#include <linux/in6.h>

#include <podwire/flow.h>

/* Seconds without a packet. Established: longer than the two hours after which keepalives begin. Datagrams: as
 * nf_conntrack counts them, short until the opener has come back after an answer, so that name lookups go soon.
 */
enum pw_lifetime {
	PW_LIFETIME_TCP_OPENING = 60,
	PW_LIFETIME_TCP_ESTABLISHED = 8000,
	PW_LIFETIME_TCP_HALF_CLOSED = 300,
	PW_LIFETIME_TCP_CLOSED = 10,
	PW_LIFETIME_DATAGRAM = 30,
	PW_LIFETIME_DATAGRAM_STREAM = 120,
	PW_LIFETIME_OTHER_STREAM = 600,
};

static __always_inline __u32 tcp_lifetime_s(__u8 state)
{
	switch (state) {
	case PW_TCP_ESTABLISHED:
		return PW_LIFETIME_TCP_ESTABLISHED;
	case PW_TCP_HALF_CLOSED:
		return PW_LIFETIME_TCP_HALF_CLOSED;
	case PW_TCP_CLOSED:
		return PW_LIFETIME_TCP_CLOSED;
	default:
		return PW_LIFETIME_TCP_OPENING;
	}
}

static __always_inline bool opens_tcp(__u8 tcp_flags)
{
	return (tcp_flags & (PW_TCP_FLAG_SYN | PW_TCP_FLAG_ACK)) == PW_TCP_FLAG_SYN;
}

static __always_inline __u8 close_side(struct pw_conntrack_value *entry, bool reply)
{
	__u16 both = PW_CONNTRACK_FIN_ORIGINAL | PW_CONNTRACK_FIN_REPLY;

	entry->flags |= reply ? PW_CONNTRACK_FIN_REPLY : PW_CONNTRACK_FIN_ORIGINAL;
	return (entry->flags & both) == both ? PW_TCP_CLOSED : PW_TCP_HALF_CLOSED;
}

/* Established takes three steps (opener, other, opener): neither a flood of SYNs nor one of stray segments makes
 * entries that live for hours.
 */
static __always_inline __u8 next_tcp_state(struct pw_conntrack_value *entry, __u8 tcp_flags,
					   bool reply)
{
	__u8 state = entry->tcp_state;

	if (tcp_flags & PW_TCP_FLAG_RST)
		return PW_TCP_CLOSED;
	if (opens_tcp(tcp_flags)) {
		/* the ports are used again, by whichever way the packet came */
		entry->flags &= ~(PW_CONNTRACK_FIN_ORIGINAL | PW_CONNTRACK_FIN_REPLY |
				  PW_CONNTRACK_PICKED_UP);
		return PW_TCP_OPENING;
	}
	if (tcp_flags & PW_TCP_FLAG_FIN)
		return close_side(entry, reply);
	if (state == PW_TCP_OPENING && reply)
		return PW_TCP_ANSWERED;
	if (state == PW_TCP_ANSWERED && !reply)
		return PW_TCP_ESTABLISHED;
	return state;
}

static __noinline int advance_tcp(struct pw_conntrack_value *entry, __u8 tcp_flags, bool reply)
{
	if (!entry)
		return 0;
	entry->tcp_state = next_tcp_state(entry, tcp_flags, reply);
	entry->lifetime_s = tcp_lifetime_s(entry->tcp_state);
	return 0;
}

/* A stream of datagrams: the opener speaks again after it was answered. */
static __always_inline void advance_datagrams(struct pw_conntrack_value *entry, __u8 protocol,
					      bool reply)
{
	if (reply) {
		entry->flags |= PW_CONNTRACK_REPLIED;
		return;
	}
	if (!(entry->flags & PW_CONNTRACK_REPLIED) || entry->packets[0] < 3)
		return;
	if (protocol == IPPROTO_UDP || protocol == IPPROTO_UDPLITE)
		entry->lifetime_s = PW_LIFETIME_DATAGRAM_STREAM;
	else if (protocol != IPPROTO_ICMP && protocol != IPPROTO_ICMPV6)
		entry->lifetime_s = PW_LIFETIME_OTHER_STREAM;
}

#endif
