// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* from_pod: everything a pod sends, at tc ingress of its host device.
 *
 * Comes to: drop; straight into the target pod (redirect to the peer, or to the queue of its host device when a rate is
 * set); into the tunnel to another node, or to it past the stack; on to the host's stack; or back to the pod, as an
 * answer of its gateway or an ICMP error. On the direct way the target's verdict is made here too, for to_pod is not
 * passed.
 */
#include <linux/bpf.h>

#include <podwire/deliver.h>
#include <podwire/frame.h>
#include <podwire/itself.h>
#include <podwire/offload.h>
#include <podwire/service.h>

/* The sender's side: the flow is looked up first, because an answer takes the way of its question. */
static __always_inline int judge_sender(struct __sk_buff *skb, struct pw_flow *flow,
					struct pw_conntrack_value *here)
{
	int reason = guard_tunnel_ends(flow, here) ?: resolve_destination(flow, here);

	if (reason)
		return reason;
	flow->here.peer_identity = flow->destination_identity;
	return judge(skb, flow, &flow->row, &flow->here, here);
}

/* The stack may translate what does not go back to the asker. */
static __always_inline int note_port(const struct pw_flow *flow)
{
	if (flow->path != PW_PATH_STACK || flow->local || flow->here.reply)
		return 0;
	return mark_stack_port(flow);
}

/* What the target remembers, if it is a pod of this node. */
static __always_inline struct pw_conntrack_value *ask_target(struct __sk_buff *skb,
							     struct pw_flow *flow)
{
	struct pw_conntrack_value *there;

	if (!flow->local)
		return NULL;
	stand_at(flow, &flow->target, PW_INGRESS);
	there = look_up_flow(skb, flow, &flow->there);
	stand_at(flow, &flow->row, PW_EGRESS);
	return there;
}

/* What is remembered of the flow as the network sees it: of one that a service translates, under its other tuple. */
static __always_inline struct pw_conntrack_value *
look_behind_service(struct __sk_buff *skb, struct pw_flow *flow, struct pw_conntrack_value *here,
		    int *reason)
{
	bool anew = here && begins_anew(flow, here);

	*reason = translate(skb, flow, here && !anew && here->kind == PW_CONNTRACK_OF_BACK_END);
	if (flow->original.translated) {
		here = find_connection(&flow->key, flow->now_ns);
		describe_match(&flow->here, &flow->key, false);
		return here;
	}
	return here && (anew || here->kind == PW_CONNTRACK_PLAIN) ? here : NULL;
}

static __always_inline int forward(struct __sk_buff *skb, struct pw_flow *flow)
{
	struct pw_conntrack_value *here, *there;
	int reason = 0;

	flow->source_identity = flow->row.identity;
	flow->now_ns = bpf_ktime_get_coarse_ns();
	here = look_up_flow(skb, flow, &flow->here);
	if (may_be_of_service(flow, here))
		here = look_behind_service(skb, flow, here, &reason);
	if (!reason && is_to_itself(flow, here))
		return loop_back(skb, flow, here);
	reason = reason ?: judge_sender(skb, flow, here);
	if (reason)
		return reason;
	there = ask_target(skb, flow);
	return choose_path(skb, flow, here, there) ?:
	       check_size(skb, flow) ?:
	       note_port(flow) ?:
	       remember_sender(flow, here) ?:
	       deliver(skb, flow, there);
}

SEC("tc")
int from_pod(struct __sk_buff *skb)
{
	struct pw_flow *flow = begin_flow(PW_HOOK_FROM_POD);
	int outcome;

	if (!flow)
		return TC_ACT_SHOT;
	outcome = copy_row(skb->ifindex, &flow->row) ?:
		  open_frame(skb, flow, PW_EGRESS) ?:
		  check_frame_of_pod(skb, flow) ?:
		  parse_packet(skb, flow) ?:
		  check_packet_of_pod(skb, flow) ?:
		  check_offload(skb, flow) ?:
		  keep_fragment(flow) ?:
		  forward(skb, flow);
	return finish(skb, flow, outcome);
}

char _license[] SEC("license") = "Dual BSD/GPL";
