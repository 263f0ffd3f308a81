/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* shards.h: which of conntrack's hashes holds a tuple, and how full it is. For the programs that see packets and for the
 * collector.
 */
#ifndef PODWIRE_SHARDS_H
#define PODWIRE_SHARDS_H

#include <podwire/maps.h>

static __always_inline __u64 stir(__u64 hash, __u64 word)
{
	hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
	return hash ^ hash >> 32;
}

static __always_inline __u64 hash_key(const struct pw_conntrack_key *key, __u32 seed)
{
	const __u64 *words = (const __u64 *)key;
	__u64 hash = stir(seed, words[0]);

	hash = stir(hash, words[1]);
	hash = stir(hash, words[2]);
	hash = stir(hash, words[3]);
	hash = stir(hash, words[4]);
	return stir(hash, *(const __u32 *)(words + 5));
}

static __always_inline __u32 hash_seed(void)
{
	__u32 zero = 0;
	const struct pw_settings *settings = bpf_map_lookup_elem(&pw_settings, &zero);

	return settings ? settings->hash_seed : 0;
}

static __always_inline __u64 seeded_hash(const struct pw_conntrack_key *key)
{
	return hash_key(key, hash_seed());
}

/* Seeded, so that nobody can aim at one shard and fill it. The key stands at a multiple of 8. */
static __always_inline __u32 shard_number(const struct pw_conntrack_key *key)
{
	return seeded_hash(key) % PW_CONNTRACK_SHARDS;
}

static __always_inline void *find_shard(const struct pw_conntrack_key *key)
{
	__u32 shard = shard_number(key);

	return bpf_map_lookup_elem(&pw_conntrack, &shard);
}

static __always_inline void count_rows(__u32 shard, __s32 by)
{
	__u32 *rows = bpf_map_lookup_elem(&pw_shard_fill, &shard);

	if (rows)
		__sync_fetch_and_add(rows, by);
}

/* From three quarters of a shard on a quota shrinks with what is left of it: with an eighth left it is half. So however
 * many pods flood, the more they take the less each may have, and a shard never fills: a pod with few flows finds room.
 */
static __noinline __u32 shrink_quota(__u32 quota, __u32 shard)
{
	__u32 behind = PW_CONNTRACK_SHARDS, room, taken;
	const __u32 *rows = bpf_map_lookup_elem(&pw_shard_fill, &shard);
	const __u32 *rooms = bpf_map_lookup_elem(&pw_shard_fill, &behind);

	if (!rows || !rooms || !*rooms)
		return quota;
	room = *rooms;
	taken = *rows;
	if (taken >= room)
		return 0;
	if (room - taken >= room / PW_SPARE_PART)
		return quota;
	return (__u64)quota * (room - taken) * PW_SPARE_PART / room;
}

#endif
