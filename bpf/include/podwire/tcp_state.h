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
	PW_LIFETIME_SERVICE_ROW = 86400, /* in fact as long as its flow's other row */
};

#define PW_STREAM_MS 2000 /* answers that go on for so long are a stream */
#define PW_MS_SHIFT  20	  /* from ns to what is nearly ms */

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

/* A connection is established when its opener has seen the answer: it acknowledges the SYN-ACK's exact sequence number,
 * which nobody sees who forges a sender's address. Without a recorded SYN-ACK both sides have to send. Until the answer
 * comes, the entry keeps the SYN's own number, by which from_netdev knows the answer.
 */
static __always_inline __u8 open_further(struct pw_conntrack_value *entry,
					 const struct pw_flow *flow, bool reply)
{
	if (reply && flow->tcp_flags & PW_TCP_FLAG_SYN) {
		entry->answer = flow->tcp_sequence;
		return PW_TCP_ANSWERED;
	}
	if (!reply && entry->tcp_state == PW_TCP_OPENING && opens_tcp(flow->tcp_flags))
		entry->answer = flow->tcp_sequence;
	if (reply)
		return entry->flags & PW_CONNTRACK_PICKED_UP ? PW_TCP_ESTABLISHED
							     : entry->tcp_state;
	return entry->tcp_state == PW_TCP_ANSWERED && flow->tcp_acknowledged == entry->answer + 1
		       ? PW_TCP_ESTABLISHED
		       : entry->tcp_state;
}

static __always_inline __u8 next_tcp_state(struct pw_conntrack_value *entry,
					   const struct pw_flow *flow, bool reply)
{
	if (flow->tcp_flags & PW_TCP_FLAG_RST)
		return PW_TCP_CLOSED;
	if (flow->tcp_flags & PW_TCP_FLAG_FIN)
		return close_side(entry, reply);
	if (entry->tcp_state < PW_TCP_ESTABLISHED)
		return open_further(entry, flow, reply);
	return entry->tcp_state;
}

static __always_inline void advance_tcp(struct pw_conntrack_value *entry,
					const struct pw_flow *flow, bool reply)
{
	entry->tcp_state = next_tcp_state(entry, flow, reply);
	entry->lifetime_s = tcp_lifetime_s(entry->tcp_state);
	if (entry->tcp_state == PW_TCP_ESTABLISHED)
		entry->flags |= PW_CONNTRACK_CONNECTION;
}

static __always_inline __u32 stream_lifetime_s(__u8 protocol)
{
	if (protocol == IPPROTO_UDP || protocol == IPPROTO_UDPLITE)
		return PW_LIFETIME_DATAGRAM_STREAM;
	return protocol == IPPROTO_ICMP || protocol == IPPROTO_ICMPV6 ? PW_LIFETIME_DATAGRAM
								      : PW_LIFETIME_OTHER_STREAM;
}

/* A stream of datagrams: the opener speaks again after it was answered, or the other side does not stop answering. To a
 * service it has to last, as in nf_conntrack: two questions to a resolver from one port are none. A pod that speaks
 * SCTP again has an association, and says nothing for half a minute where it has nothing to say.
 */
static __always_inline void advance_datagrams(struct pw_conntrack_value *entry,
					      const struct pw_flow *flow, bool reply)
{
	bool asks = entry->kind != PW_CONNTRACK_PLAIN && flow->key.protocol != IPPROTO_SCTP;
	__u32 now_ms = flow->now_ns >> PW_MS_SHIFT;

	if (reply && !(entry->flags & PW_CONNTRACK_REPLIED)) {
		entry->flags |= PW_CONNTRACK_REPLIED;
		entry->answer = now_ms;
		return;
	}
	if (!(entry->flags & PW_CONNTRACK_REPLIED) ||
	    ((reply || asks) && now_ms - entry->answer < PW_STREAM_MS))
		return;
	entry->flags |= PW_CONNTRACK_CONNECTION;
	entry->lifetime_s = stream_lifetime_s(flow->key.protocol);
}

#endif
