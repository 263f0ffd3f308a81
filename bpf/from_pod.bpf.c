// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* from_pod: everything a pod sends, at tc ingress of its host device.
 *
 * Comes to: drop; straight into the target pod (redirect to the peer, or to the queue of its host device when a rate
 * is set); into the tunnel to another node, or to it past the stack; on to the host's stack; or back to the pod, as an answer of its gateway or
 * an ICMP error. On the direct way the target's verdict is made here too, for to_pod is not passed.
 */
#include <linux/bpf.h>

#include <podwire/deliver.h>
#include <podwire/frame.h>

/* The sender's side: the flow is looked up first, because an answer takes the way of its question. */
static __always_inline int judge_sender(struct __sk_buff *skb, struct pw_flow *flow)
{
	flow->source_identity = flow->row.identity;
	flow->there.entry = NULL;
	flow->now_ns = bpf_ktime_get_coarse_ns();
	look_up_flow(skb, flow, &flow->here);
	return guard_tunnel_port(flow) ?:
	       resolve_destination(flow) ?:
	       judge(skb, flow, &flow->row, &flow->here, flow->destination_identity) ?:
	       choose_path(skb, flow) ?:
	       check_size(skb, flow) ?:
	       remember(flow, &flow->row, &flow->here, flow->destination_identity);
}

SEC("tc")
int from_pod(struct __sk_buff *skb)
{
	struct pw_flow flow = {.hook = PW_HOOK_FROM_POD};
	int outcome = copy_row(skb->ifindex, &flow.row) ?:
		      open_frame(skb, &flow, PW_EGRESS) ?:
		      check_frame_of_pod(skb, &flow) ?:
		      parse_packet(skb, &flow) ?:
		      check_packet_of_pod(skb, &flow) ?:
		      judge_sender(skb, &flow) ?:
		      deliver(skb, &flow);

	return finish(skb, &flow, outcome);
}

char _license[] SEC("license") = "Dual BSD/GPL";
