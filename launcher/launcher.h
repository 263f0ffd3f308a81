/* launcher.h: what the parts of podwire-cni share. The protocol's numbers are those of
 * podwire/model/wire.py (docs/protocol.md); tests/contract/test_launcher.py compares them.
 */
#ifndef PODWIRE_LAUNCHER_H
#define PODWIRE_LAUNCHER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAJOR 1
#define MINOR 0
#define FRAME_MAX_BYTES 1048576
#define STDIN_MAX_BYTES 983040
#define REPLY_MAX_BYTES 1048576
#define SOCKET_PATH_MAX_BYTES 107
#define COMMON_HEADER_BYTES 12
#define REQUEST_HEADER_BYTES 24
#define AGENT_WAIT_DEFAULT_S 30
#define AGENT_WAIT_MAX_S 600
#define REPLY_WAIT_MS 120000
#define DEL_WAIT_MS 20000
#define STATUS_WAIT_MS 200
#define DEFAULT_SOCKET "/run/podwire/cni.sock"
#define SPOOL_DIRECTORY "spool"
#define ALIVE_FILE "alive"
#define DEL_WAIT_VARIABLE "PODWIRE_DEL_TIMEOUT_MS"

#define FLAG_NETNS 1
#define FLAG_MNTNS 2

#define ITEM_PROGRAM 1
#define ITEM_ENVIRONMENT 2
#define ITEM_STDIN 3
#define ITEM_BOOT_ID 4
#define ITEM_NETNS_ERRNO 5
#define ITEM_LAUNCHER_VERSION 6

#define STATUS_DONE 0
#define STATUS_FAILED 1
#define STATUS_NOT_NOW 2

/* Codes of the CNI specification that the launcher itself answers with. */
#define CODE_ENVIRONMENT 4
#define CODE_IO 5
#define CODE_DECODE 6
#define CODE_CONFIGURATION 7
#define CODE_TRY_AGAIN 11
#define CODE_CANNOT_SERVE 50

#define PATH_BYTES 256

/* text.c: text of bounded length. What does not fit is left out. */
struct text {
	char data[8192];
	size_t length;
};

void put(struct text *text, const char *part);
void put_number(struct text *text, unsigned long long number, int width);
void put_errno(struct text *text, int number);
void put_json_string(struct text *text, const char *data, size_t length);
bool write_all(int fd, const void *data, size_t length);
int fail(const char *cni_version, int code, const struct text *message, const char *hint);
int fail_plain(const char *cni_version, int code, const char *message, const char *hint);
int answer_version(const char *cni_version);
bool is_supported_version(const char *version);

/* config.c: the three keys that the launcher needs to know. */
struct config {
	char socket[SOCKET_PATH_MAX_BYTES + 1];
	long agent_wait_s;
	char cni_version
		[16]; /* one that we speak; 1.1.0 when the configuration names none of them */
	int code;     /* 0 = usable */
	const char *fault;
};

void read_config(const unsigned char *data, size_t length, struct config *config);

/* frame.c: the request, collected once per process. */
struct frame {
	size_t length;
	const unsigned char *input;
	size_t input_length;
	int fds[2];
	size_t fd_count;
	unsigned int descriptor_flags;
	char boot_id[64];
	uint64_t started_ns;
	bool environment_fits;
	int input_errno;
	/* Last, so that the other members share a page with what is used of it. Behind FRAME_MAX_BYTES: room for
	 * too much, so that it can be refused by its name. */
	unsigned char data[FRAME_MAX_BYTES + STDIN_MAX_BYTES + REQUEST_HEADER_BYTES];
};

uint64_t boottime_ns(void);
int64_t monotonic_ms(void);
void collect_frame(struct frame *frame, const char *program, bool is_add, uint64_t started_ns);
void close_frame(struct frame *frame);
void write_header(struct frame *frame, bool with_descriptors);

/* agent.c: one exchange with the agent. */
enum outcome {
	ANSWERED,
	ABSENT,	     /* nobody listens, or the request was not read: nothing has begun */
	SILENT,	     /* the time was over */
	ENDED,	     /* the agent went away with the request in its hands */
	UNREACHABLE, /* any other error, in saved_errno */
};

struct reply {
	size_t length;
	int saved_errno;
	unsigned char data[REPLY_MAX_BYTES];
};

struct patience {
	int64_t absent_until_ms; /* CLOCK_MONOTONIC; 0 = do not wait for an agent that is not there */
	int64_t busy_until_ms;	 /* how long to knock when the backlog is full */
	int64_t reply_ms;	 /* how long to wait for the answer to a request that was sent, */
	int64_t reply_until_ms; /* at most until then; 0 = no such end */
};

enum outcome ask_agent(const char *socket_path, struct frame *frame,
		       const struct patience *patience, struct reply *reply);
int reply_status(const struct reply *reply);

/* spool.c: what works without an agent. */
int spool_request(const char *socket_path, struct frame *frame, struct text *what_failed);
bool agent_was_alive(const char *socket_path, const char *boot_id);

/* exec.c */
int run_helper(int argc, char **argv);

/* loopback.c */
bool is_loopback(const char *program);
int run_loopback(const char *command, const char *cni_version);

#endif
