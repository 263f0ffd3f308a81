/* agent.c: connects, sends one frame with its descriptors, reads one reply. Every wait ends. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "launcher.h"

#define KNOCK_FIRST_MS 2
#define KNOCK_LONGEST_MS 100

static bool means_absent(int number)
{
	return number == ENOENT || number == ECONNREFUSED || number == ENOTDIR;
}

/* A connected, non-blocking socket, or -1 with errno. */
static int connect_once(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	int saved_errno;

	if (fd < 0)
		return -1;
	strcpy(address.sun_path, path);
	if (!connect(fd, (struct sockaddr *)&address, sizeof(address)))
		return fd;
	saved_errno = errno;
	close(fd);
	errno = saved_errno;
	return -1;
}

/* Sleep before the next attempt, each time longer; false when `until_ms` is over. */
static bool pause_until(int64_t until_ms, int64_t *pause_ms)
{
	int64_t left_ms = until_ms - monotonic_ms();

	if (left_ms <= 0)
		return false;
	poll(NULL, 0, (int)(left_ms < *pause_ms ? left_ms : *pause_ms));
	*pause_ms = *pause_ms * 2 > KNOCK_LONGEST_MS ? KNOCK_LONGEST_MS : *pause_ms * 2;
	return true;
}

/* Wait until the socket is ready; false when the time is over. */
static bool wait_ready(int fd, short events, int64_t until_ms)
{
	struct pollfd poller = {.fd = fd, .events = events};

	for (;;) {
		int64_t left_ms = until_ms - monotonic_ms();

		if (left_ms <= 0)
			return false;
		if (poll(&poller, 1, (int)left_ms) > 0)
			return true;
	}
}

static ssize_t send_some(int fd, const struct frame *frame, size_t sent)
{
	union {
		char data[CMSG_SPACE(sizeof(frame->fds))];
		struct cmsghdr align;
	} control = {0};
	struct iovec part = {.iov_base = (void *)(frame->data + sent),
			     .iov_len = frame->length - sent};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

	if (!sent && frame->fd_count) {
		size_t bytes = frame->fd_count * sizeof(int);
		struct cmsghdr *header;

		message.msg_control = control.data;
		message.msg_controllen = (socklen_t)CMSG_SPACE(bytes);
		header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = (socklen_t)CMSG_LEN(bytes);
		memcpy(CMSG_DATA(header), frame->fds, bytes);
	}
	return sendmsg(fd, &message, MSG_NOSIGNAL);
}

static enum outcome classify(int number, struct reply *reply)
{
	reply->saved_errno = number;
	return number == ECONNRESET || number == EPIPE ? ABSENT : UNREACHABLE;
}

static enum outcome send_frame(int fd, const struct frame *frame, int64_t until_ms,
			       struct reply *reply)
{
	size_t sent = 0;

	while (sent < frame->length) {
		ssize_t count = send_some(fd, frame, sent);

		if (count >= 0) {
			sent += (size_t)count;
		} else if (errno == EAGAIN) {
			if (!wait_ready(fd, POLLOUT, until_ms))
				return SILENT;
		} else if (errno == EPIPE || errno == ECONNRESET) {
			/* An agent that refuses a frame answers and closes: its answer may be there. */
			return ANSWERED;
		} else if (errno != EINTR) {
			return classify(errno, reply);
		}
	}
	return ANSWERED;
}

static uint32_t load32(const unsigned char *at)
{
	return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* The bytes that are still to come; -1 when what came is no reply. */
static ssize_t missing_bytes(const struct reply *reply)
{
	uint32_t total;

	if (reply->length < COMMON_HEADER_BYTES)
		return (ssize_t)(COMMON_HEADER_BYTES - reply->length);
	total = load32(reply->data + 8);
	if (memcmp(reply->data, "PWRP", 4) || total < reply->length || total > REPLY_MAX_BYTES)
		return -1;
	return (ssize_t)(total - reply->length);
}

static enum outcome receive_reply(int fd, int64_t until_ms, struct reply *reply)
{
	ssize_t missing;

	reply->length = 0;
	while ((missing = missing_bytes(reply))) {
		ssize_t count;

		if (missing < 0)
			return ENDED;
		count = recv(fd, reply->data + reply->length, sizeof(reply->data) - reply->length,
			     0);
		if (count > 0) {
			reply->length += (size_t)count;
		} else if (count == 0) {
			return ENDED;
		} else if (errno == EAGAIN) {
			if (!wait_ready(fd, POLLIN, until_ms))
				return SILENT;
		} else if (errno != EINTR) {
			return classify(errno, reply);
		}
	}
	return ANSWERED;
}

static enum outcome exchange(int fd, const struct frame *frame, int64_t until_ms,
			     struct reply *reply)
{
	enum outcome outcome = send_frame(fd, frame, until_ms, reply);

	return outcome == ANSWERED ? receive_reply(fd, until_ms, reply) : outcome;
}

/* One attempt: connect and exchange. */
static enum outcome try_agent(const char *path, const struct frame *frame,
			      const struct patience *patience, struct reply *reply)
{
	int64_t until_ms = monotonic_ms() + patience->reply_ms;
	enum outcome outcome;
	int fd = connect_once(path);

	if (patience->reply_until_ms && until_ms > patience->reply_until_ms)
		until_ms = patience->reply_until_ms;
	if (fd < 0) {
		reply->saved_errno = errno;
		return means_absent(errno) ? ABSENT : UNREACHABLE;
	}
	outcome = exchange(fd, frame, until_ms, reply);
	close(fd);
	return outcome;
}

enum outcome ask_agent(const char *socket_path, struct frame *frame,
		       const struct patience *patience, struct reply *reply)
{
	int64_t pause_ms = KNOCK_FIRST_MS;

	for (;;) {
		enum outcome outcome = try_agent(socket_path, frame, patience, reply);

		if (outcome == ABSENT && pause_until(patience->absent_until_ms, &pause_ms))
			continue;
		if (outcome == UNREACHABLE && reply->saved_errno == EAGAIN) {
			if (pause_until(patience->busy_until_ms, &pause_ms))
				continue;
			return SILENT;
		}
		return outcome;
	}
}

int reply_status(const struct reply *reply)
{
	return reply->data[6] | reply->data[7] << 8;
}
