/* podwire-cni: what a container runtime executes. It carries the request to the agent and the answer
 * back, and knows nothing about networks. What it does when the agent is not there is a table in
 * docs/protocol.md; each command below is one row of it. Called as podwire-ipam it is the same
 * program, and the frame says so. Called as loopback it is that plugin, and asks nobody.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher.h"

static struct frame frame;
static struct config config;
static struct reply reply;

static int print_reply(void)
{
	bool printed = write_all(STDOUT_FILENO, reply.data + COMMON_HEADER_BYTES,
				 reply.length - COMMON_HEADER_BYTES);

	return printed && reply_status(&reply) == STATUS_DONE ? 0 : 1;
}

static int fail_without_agent(enum outcome outcome)
{
	static struct text message;
	int code = CODE_TRY_AGAIN;

	put(&message, "ask the agent at '");
	put(&message, config.socket);
	put(&message, "': ");
	if (outcome == SILENT) {
		put(&message, "no answer in time");
	} else if (outcome == ENDED) {
		put(&message, "it ended before it answered");
	} else {
		code = outcome == ABSENT ? CODE_TRY_AGAIN : CODE_IO;
		put_errno(&message, reply.saved_errno);
	}
	return fail(config.cni_version, code, &message,
		    "is podwire-agent running? see `podwire status` and its log");
}

static int run_add_or_check(void)
{
	int64_t until_ms = monotonic_ms() + config.agent_wait_s * 1000;
	struct patience patience = {until_ms, until_ms, REPLY_WAIT_MS, 0};
	enum outcome outcome = ask_agent(config.socket, &frame, &patience, &reply);

	return outcome == ANSWERED ? print_reply() : fail_without_agent(outcome);
}

static int run_gc(void)
{
	struct patience patience = {0, monotonic_ms() + config.agent_wait_s * 1000, REPLY_WAIT_MS,
				    0};
	enum outcome outcome = ask_agent(config.socket, &frame, &patience, &reply);

	return outcome == ANSWERED ? print_reply() : fail_without_agent(outcome);
}

static long del_wait_ms(void)
{
	const char *text = getenv(DEL_WAIT_VARIABLE);
	char *end;
	long wait_ms = text ? strtol(text, &end, 10) : 0;

	return text && *text && !*end && wait_ms > 0 && wait_ms <= DEL_WAIT_MS ? wait_ms
									       : DEL_WAIT_MS;
}

static int run_del(void)
{
	long wait_ms = del_wait_ms();
	int64_t until_ms = monotonic_ms() + wait_ms;
	struct patience patience = {0, until_ms, wait_ms, until_ms};
	static struct text message;

	if (ask_agent(config.socket, &frame, &patience, &reply) == ANSWERED &&
	    reply_status(&reply) != STATUS_NOT_NOW)
		return print_reply();
	put(&message, "record the DEL for the agent: ");
	if (!spool_request(config.socket, &frame, &message))
		return 0;
	return fail(config.cni_version, CODE_IO, &message,
		    "the agent does not answer and its spool cannot be written; make room or start "
		    "podwire-agent");
}

static int run_status(void)
{
	int64_t until_ms = monotonic_ms() + STATUS_WAIT_MS;
	struct patience patience = {0, until_ms, STATUS_WAIT_MS, until_ms};

	if (ask_agent(config.socket, &frame, &patience, &reply) == ANSWERED)
		return print_reply();
	if (agent_was_alive(config.socket, frame.boot_id))
		return 0;
	return fail_plain(config.cni_version, CODE_CANNOT_SERVE, "the agent does not answer",
			  "start podwire-agent; running pods are not affected");
}

static int run_version(void)
{
	if (!frame.input_length)
		return answer_version("1.1.0");
	if (config.code == CODE_DECODE)
		return fail_plain(config.cni_version, config.code, config.fault,
				  "write JSON to stdin");
	return answer_version(config.cni_version);
}

static const struct command {
	const char *name;
	int (*run)(void);
} commands[] = {
	{"ADD", run_add_or_check}, {"CHECK", run_add_or_check}, {"DEL", run_del}, {"GC", run_gc},
	{"STATUS", run_status},	   {"VERSION", run_version},
};

static const struct command *find_command(const char *name)
{
	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
		if (!strcmp(name, commands[i].name))
			return &commands[i];
	return NULL;
}

static int introduce(void)
{
	static struct text text;

	put(&text,
	    "podwire-cni " PODWIRE_VERSION ": the CNI plugin of podwire, CNI 0.1.0 to 1.1.0\n"
	    "A container runtime runs it, with CNI_COMMAND set. To install it, copy it to where "
	    "the runtime looks for plugins (/opt/cni/bin); see docs/containers.md\n");
	write_all(STDERR_FILENO, text.data, text.length);
	return 0;
}

/* With one of 0, 1, 2 closed, a socket would take its number and the answer would go there. */
static void occupy_standard_descriptors(void)
{
	for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
		if (fcntl(fd, F_GETFD) < 0 &&
		    open("/dev/null", fd == STDIN_FILENO ? O_RDONLY : O_WRONLY) < 0)
			_exit(1);
}

static int refuse_unknown_command(const char *name)
{
	static struct text message;

	put(&message, "CNI_COMMAND is '");
	put(&message, strlen(name) > 64 ? "..." : name);
	put(&message, "'");
	return fail(config.cni_version, CODE_ENVIRONMENT, &message,
		    "CNI_COMMAND must be ADD, DEL, CHECK, GC, STATUS or VERSION");
}

/* Everything that needs no agent to be refused; 0 = the request can be sent. */
static int refuse_unusable(void)
{
	static struct text message;

	if (frame.input_errno) {
		put(&message, "read stdin: ");
		put_errno(&message, frame.input_errno);
		return fail(config.cni_version, CODE_IO, &message,
			    "give the network configuration on stdin");
	}
	if (frame.input_length > STDIN_MAX_BYTES)
		return fail_plain("1.1.0", CODE_DECODE,
				  "read the network configuration: it has more than 983040 bytes",
				  "make the configuration on stdin smaller");
	if (config.code)
		return fail_plain(config.cni_version, config.code, config.fault,
				  "correct the network configuration; see docs/protocol.md");
	if (!frame.environment_fits || frame.length > FRAME_MAX_BYTES)
		return fail_plain(config.cni_version, CODE_ENVIRONMENT,
				  "the environment does not fit the request",
				  "make the CNI_* variables shorter");
	return 0;
}

int main(int argc, char **argv)
{
	uint64_t started_ns = boottime_ns();
	const char *name = getenv("CNI_COMMAND");
	const struct command *command;

	occupy_standard_descriptors();
	if (argc > 1 && !strcmp(argv[1], "exec"))
		return run_helper(argc, argv);
	if (!name || !*name)
		return introduce();
	signal(SIGPIPE, SIG_IGN);
	collect_frame(&frame, argc ? argv[0] : "podwire-cni", !strcmp(name, "ADD"), started_ns);
	if (frame.input_length <= STDIN_MAX_BYTES)
		read_config(frame.input, frame.input_length, &config);
	close_frame(&frame);
	command = find_command(name);
	if (!command)
		return refuse_unknown_command(name);
	if (command->run == run_version && !frame.input_errno &&
	    frame.input_length <= STDIN_MAX_BYTES)
		return run_version();
	if (refuse_unusable())
		return 1;
	return argc && is_loopback(argv[0]) ? run_loopback(name, config.cni_version)
					    : command->run();
}
