/* exchanges.c: many short exchanges from client pods to server pods, each from a fresh port: a question and an answer by UDP,
 * and TCP connections of one question and one answer, which the client closes.
 *
 * exchanges WANTED-S AT-MOST-S UDP-PER-S TCP-PER-S CLIENTS CLIENT-NS... {SERVER-NS ADDRESS}...
 *
 * The rates are those of all clients together. WANTED-S times a rate is how many are asked, unless AT-MOST-S ends it earlier.
 * A client has so many questions open at once and no more, so the answers set its pace; what it could not ask in time it
 * asks later, at no higher rate. Nothing is asked twice. Prints JSON: per protocol how many were asked, answered, refused
 * (an error came) and lost (nothing came); of TCP also how many connections had to send a segment again. IPv4.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S       1000000000LL
#define QUESTION_BYTES 40
#define ANSWER_BYTES   120
#define FIRST_PORT     1024
#define PORTS	       (65536 - FIRST_PORT)
#define PODS_MAX       64
#define OPEN_MAX       64 /* of one protocol and client: all fit into a CPU's backlog of 1,000 packets */
#define LOST_NS	       (30 * NS_PER_S) /* a machine may stand still for a while */
#define BEHIND_NS      (NS_PER_S / 4)  /* what is later than that sets the clock back */
#define LOOK_NS	       (NS_PER_S / 5)
#define WAIT_MS	       2
#define EVENTS	       128
#define RECEIVE_BYTES  (8 << 20)

enum protocol { UDP, TCP, PROTOCOLS };

static const int SERVER_PORT[PROTOCOLS] = {53, 80};

struct counts {
	long long asked, answered, refused, lost, sent_again;
};

struct exchange {
	int fd; /* -1: free */
	enum protocol protocol;
	bool connected;
	long long asked_ns;
	long long number;
};

struct client {
	const char *namespace;
	pthread_t thread;
	int epoll;
	int first_server;
	int port[PROTOCOLS];
	int open[PROTOCOLS];
	long long pace_ns
		[PROTOCOLS]; /* when the first would have been asked had the clock never been set back */
	long long end_ns;
	struct counts counts[PROTOCOLS];
	struct exchange exchanges[PROTOCOLS][OPEN_MAX];
};

struct server {
	const char *namespace;
	struct in_addr address;
	pthread_t thread;
	int epoll, udp, listener;
};

static struct client clients[PODS_MAX];
static struct server servers[PODS_MAX];
static int client_count, server_count;
static double rate[PROTOCOLS]; /* of one client, per second */
static long long wanted[PROTOCOLS], begin_ns, until_ns;
static volatile bool over;
static pthread_barrier_t ready;

static long long now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * NS_PER_S + now.tv_nsec;
}

static void die(const char *what)
{
	perror(what);
	exit(1);
}

/* For this thread alone; every socket that it makes from now on is there. */
static void enter(const char *namespace)
{
	int fd = open(namespace, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || setns(fd, CLONE_NEWNET))
		die(namespace);
	close(fd);
}

static void set_sysctl(const char *path, const char *value)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0 || write(fd, value, strlen(value)) < 0)
		die(path);
	close(fd);
}

static void watch(int epoll, int operation, int fd, uint32_t events, void *what)
{
	struct epoll_event event = {.events = events, .data.ptr = what};

	if (epoll_ctl(epoll, operation, fd, &event))
		die("watch a socket");
}

static int make_socket(enum protocol protocol)
{
	int kind = protocol == UDP ? SOCK_DGRAM : SOCK_STREAM, one = 1;
	int fd = socket(AF_INET, kind | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (fd < 0)
		die("make a socket");
	if (protocol == TCP && (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) ||
				setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one))))
		die("set up a socket");
	return fd;
}

/* Clients */

static void end_exchange(struct client *client, struct exchange *exchange, long long *count)
{
	*count += 1;
	close(exchange->fd);
	exchange->fd = -1;
	client->open[exchange->protocol]--;
}

static void refuse(struct client *client, struct exchange *exchange)
{
	end_exchange(client, exchange, &client->counts[exchange->protocol].refused);
}

static void ask(struct client *client, struct exchange *exchange)
{
	char question[QUESTION_BYTES] = {0};

	memcpy(question, &exchange->number, sizeof(exchange->number));
	if (send(exchange->fd, question, sizeof(question), MSG_NOSIGNAL) != sizeof(question))
		refuse(client, exchange);
}

/* The port after the last one, so that all others are used before one is used again. */
static void bind_fresh(struct client *client, struct exchange *exchange)
{
	struct sockaddr_in here = {.sin_family = AF_INET};

	for (int tries = 0; tries < PORTS; tries++) {
		int *port = &client->port[exchange->protocol];

		*port = (*port + 1) % PORTS;
		here.sin_port = htons(FIRST_PORT + *port);
		if (!bind(exchange->fd, (struct sockaddr *)&here, sizeof(here)))
			return;
		if (errno != EADDRINUSE)
			break;
	}
	die("bind to a fresh port");
}

static void begin(struct client *client, enum protocol protocol)
{
	struct exchange *exchange = client->exchanges[protocol];
	struct sockaddr_in there = {.sin_family = AF_INET};
	struct server *server;

	while (exchange->fd >= 0)
		exchange++;
	exchange->fd = make_socket(protocol);
	exchange->protocol = protocol;
	exchange->connected = protocol == UDP;
	exchange->asked_ns = now_ns();
	exchange->number = client->counts[protocol].asked++;
	client->open[protocol]++;
	bind_fresh(client, exchange);
	server = &servers[(client->first_server + exchange->number) % server_count];
	there.sin_addr = server->address;
	there.sin_port = htons(SERVER_PORT[protocol]);
	watch(client->epoll, EPOLL_CTL_ADD, exchange->fd, protocol == UDP ? EPOLLIN : EPOLLOUT,
	      exchange);
	if (connect(exchange->fd, (struct sockaddr *)&there, sizeof(there)) &&
	    errno != EINPROGRESS) {
		if (errno == EADDRNOTAVAIL)
			die("connect from a fresh port");
		refuse(client, exchange);
	} else if (protocol == UDP) {
		ask(client, exchange);
	}
}

static void finish(struct client *client, struct exchange *exchange)
{
	struct counts *counts = &client->counts[exchange->protocol];
	struct tcp_info info = {0};
	socklen_t size = sizeof(info);
	char answer[ANSWER_BYTES];
	ssize_t got = recv(exchange->fd, answer, sizeof(answer), 0);

	if (got < 0 && errno == EAGAIN)
		return;
	if (got != sizeof(answer) || memcmp(answer, &exchange->number, sizeof(exchange->number))) {
		refuse(client, exchange);
		return;
	}
	if (exchange->protocol == TCP &&
	    !getsockopt(exchange->fd, IPPROTO_TCP, TCP_INFO, &info, &size) &&
	    info.tcpi_total_retrans)
		counts->sent_again++;
	end_exchange(client, exchange, &counts->answered);
}

static void proceed(struct client *client, struct exchange *exchange)
{
	int error = 0;
	socklen_t size = sizeof(error);

	if (exchange->connected) {
		finish(client, exchange);
		return;
	}
	if (getsockopt(exchange->fd, SOL_SOCKET, SO_ERROR, &error, &size) || error) {
		refuse(client, exchange);
		return;
	}
	exchange->connected = true;
	watch(client->epoll, EPOLL_CTL_MOD, exchange->fd, EPOLLIN, exchange);
	ask(client, exchange);
}

static void give_up_lost(struct client *client, long long now)
{
	for (int protocol = 0; protocol < PROTOCOLS; protocol++)
		for (int i = 0; i < OPEN_MAX; i++) {
			struct exchange *exchange = &client->exchanges[protocol][i];

			if (exchange->fd >= 0 && now - exchange->asked_ns > LOST_NS)
				end_exchange(client, exchange, &client->counts[protocol].lost);
		}
}

static bool has_more(const struct client *client, enum protocol protocol, long long now)
{
	return client->counts[protocol].asked < wanted[protocol] && now < until_ns;
}

static void ask_what_is_due(struct client *client, enum protocol protocol, long long now)
{
	struct counts *counts = &client->counts[protocol];
	long long *pace_ns = &client->pace_ns[protocol];
	long long latest_ns =
		now - (long long)(counts->asked * NS_PER_S / rate[protocol]) - BEHIND_NS;

	if (*pace_ns < latest_ns)
		*pace_ns = latest_ns;
	while (has_more(client, protocol, now) && client->open[protocol] < OPEN_MAX &&
	       counts->asked < (now - *pace_ns) * rate[protocol] / NS_PER_S)
		begin(client, protocol);
}

static void *run_client(void *argument)
{
	struct client *client = argument;
	struct epoll_event events[EVENTS];
	long long now, look_ns;

	enter(client->namespace);
	/* A connection that the client has closed keeps its port for a minute otherwise. */
	set_sysctl("/proc/sys/net/ipv4/tcp_tw_reuse", "1");
	client->epoll = epoll_create1(EPOLL_CLOEXEC);
	memset(client->exchanges, -1, sizeof(client->exchanges));
	pthread_barrier_wait(&ready);
	pthread_barrier_wait(&ready);
	look_ns = now = client->pace_ns[UDP] = client->pace_ns[TCP] = begin_ns;
	while (has_more(client, UDP, now) || has_more(client, TCP, now) || client->open[UDP] ||
	       client->open[TCP]) {
		int count = epoll_wait(client->epoll, events, EVENTS, WAIT_MS);

		for (int i = 0; i < count; i++)
			proceed(client, events[i].data.ptr);
		now = now_ns();
		if (now - look_ns > LOOK_NS) {
			give_up_lost(client, now);
			look_ns = now;
		}
		for (int protocol = 0; protocol < PROTOCOLS; protocol++)
			if (rate[protocol] > 0)
				ask_what_is_due(client, protocol, now);
	}
	client->end_ns = now;
	return NULL;
}

/* Servers */

static int serve(struct server *server, enum protocol protocol)
{
	struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr = server->address};
	int fd = make_socket(protocol), bytes = RECEIVE_BYTES;

	here.sin_port = htons(SERVER_PORT[protocol]);
	if (bind(fd, (struct sockaddr *)&here, sizeof(here)))
		die("bind a server");
	if (protocol == UDP && setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof(bytes)))
		die("make room for questions");
	if (protocol == TCP && listen(fd, SOMAXCONN))
		die("listen");
	return fd;
}

static void answer_datagrams(int fd)
{
	char data[ANSWER_BYTES] = {0};
	struct sockaddr_in from;
	socklen_t size = sizeof(from);

	while (recvfrom(fd, data, QUESTION_BYTES, 0, (struct sockaddr *)&from, &size) > 0)
		sendto(fd, data, sizeof(data), 0, (struct sockaddr *)&from, size);
}

static void answer_connection(int fd)
{
	char data[ANSWER_BYTES] = {0};
	ssize_t got = recv(fd, data, QUESTION_BYTES, 0);

	if (got > 0)
		send(fd, data, sizeof(data), MSG_NOSIGNAL);
	else if (!got || errno != EAGAIN)
		close(fd);
}

static void accept_all(struct server *server)
{
	int fd;

	while ((fd = accept4(server->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0)
		watch(server->epoll, EPOLL_CTL_ADD, fd, EPOLLIN, (void *)(intptr_t)fd);
}

static void *run_server(void *argument)
{
	struct server *server = argument;
	struct epoll_event events[EVENTS];

	enter(server->namespace);
	server->epoll = epoll_create1(EPOLL_CLOEXEC);
	server->udp = serve(server, UDP);
	server->listener = serve(server, TCP);
	watch(server->epoll, EPOLL_CTL_ADD, server->udp, EPOLLIN, (void *)(intptr_t)server->udp);
	watch(server->epoll, EPOLL_CTL_ADD, server->listener, EPOLLIN,
	      (void *)(intptr_t)server->listener);
	pthread_barrier_wait(&ready);
	pthread_barrier_wait(&ready);
	while (!over) {
		int count = epoll_wait(server->epoll, events, EVENTS, 100);

		for (int i = 0; i < count; i++) {
			int fd = (intptr_t)events[i].data.ptr;

			if (fd == server->udp)
				answer_datagrams(fd);
			else if (fd == server->listener)
				accept_all(server);
			else
				answer_connection(fd);
		}
	}
	return NULL;
}

/* All */

static void read_arguments(int argc, char **argv)
{
	double wanted_s = atof(argv[1]);
	int places;

	client_count = atoi(argv[5]);
	places = argc - 6 - client_count;
	server_count = places / 2;
	if (client_count < 1 || client_count > PODS_MAX || places < 2 || places % 2 ||
	    server_count > PODS_MAX)
		exit(2);
	for (int protocol = 0; protocol < PROTOCOLS; protocol++) {
		rate[protocol] = atof(argv[3 + protocol]) / client_count;
		wanted[protocol] = rate[protocol] * wanted_s + 0.5;
	}
	for (int i = 0; i < client_count; i++) {
		clients[i].namespace = argv[6 + i];
		clients[i].first_server = i;
	}
	for (int i = 0; i < server_count; i++) {
		servers[i].namespace = argv[6 + client_count + 2 * i];
		if (inet_pton(AF_INET, argv[7 + client_count + 2 * i], &servers[i].address) != 1)
			exit(2);
	}
}

static void print(void)
{
	static const char *const NAMES[PROTOCOLS] = {"udp", "tcp"};
	long long end_ns = begin_ns;

	printf("{");
	for (int protocol = 0; protocol < PROTOCOLS; protocol++) {
		struct counts all = {0};

		for (int i = 0; i < client_count; i++) {
			const struct counts *one = &clients[i].counts[protocol];

			all.asked += one->asked;
			all.answered += one->answered;
			all.refused += one->refused;
			all.lost += one->lost;
			all.sent_again += one->sent_again;
			if (clients[i].end_ns > end_ns)
				end_ns = clients[i].end_ns;
		}
		printf("\"%s\": {\"asked\": %lld, \"answered\": %lld, \"refused\": %lld, \"lost\": "
		       "%lld, "
		       "\"sent_again\": %lld}, ",
		       NAMES[protocol], all.asked, all.answered, all.refused, all.lost,
		       all.sent_again);
	}
	printf("\"seconds\": %.3f}\n", (end_ns - begin_ns) / (double)NS_PER_S);
}

int main(int argc, char **argv)
{
	if (argc < 9)
		return 2;
	read_arguments(argc, argv);
	pthread_barrier_init(&ready, NULL, client_count + server_count + 1);
	for (int i = 0; i < server_count; i++)
		if (pthread_create(&servers[i].thread, NULL, run_server, &servers[i]))
			die("start a server");
	for (int i = 0; i < client_count; i++)
		if (pthread_create(&clients[i].thread, NULL, run_client, &clients[i]))
			die("start a client");
	pthread_barrier_wait(&ready);
	begin_ns = now_ns();
	until_ns = begin_ns + (long long)(atof(argv[2]) * NS_PER_S);
	pthread_barrier_wait(&ready);
	for (int i = 0; i < client_count; i++)
		pthread_join(clients[i].thread, NULL);
	over = true;
	for (int i = 0; i < server_count; i++)
		pthread_join(servers[i].thread, NULL);
	print();
	return 0;
}
