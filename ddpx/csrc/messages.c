/* A message plan's operations run in one call: post, move bytes through sockets, wait, add.
 *
 * One thread does it all. Between two ranks runs one connection, and on it messages in the order posted. Each begins
 * with a label, which says how long it is and in which epoch, entered with which header, its sender posted it; the
 * receiver has said the same for itself, so whoever gets a message meant for something else knows at once. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "operations.h"

enum { WELL, CLOSED, LATE, OTHER }; /* how a wait ends; ddpx/transport/sockets.py knows them too */

enum { LOW_BYTES = 256 << 10 }; /* be woken for so much at a time, or for the end of a message */

typedef struct {
    uint64_t bytes, epoch, header;
} label;

typedef struct {
    label says;
    char *at;
} message;

/* Messages of one direction. The first that has not ended is under way: `passed` bytes of it have gone, label first. */
typedef struct {
    message *ring;
    uint64_t capacity, posted, ended, passed;
    uint64_t base; /* posted before the present plan, whose own numbers begin at 1 */
} queue;

typedef struct {
    int fd, low;
    int shut; /* nothing can be sent any more; what came is still there to read */
    label came;
    queue in, out;
} connection;

typedef struct {
    int64_t n;
    label now;         /* of what is posted from here on; its bytes are not used */
    int64_t waits_for; /* the peer, -1 for none; read by other threads */
    uint64_t wrong[7]; /* after CLOSED, LATE, OTHER: the peer; then the label that came, and the one expected */
    struct pollfd *polled;
    connection of[];
} mesh;

mesh *ddpx_mesh(int64_t n) {
    mesh *m = calloc(1, sizeof *m + n * sizeof *m->of);
    if (!m) return NULL;
    m->n = n;
    m->waits_for = -1;
    m->polled = calloc(n, sizeof *m->polled);
    if (!m->polled) {
        free(m);
        return NULL;
    }
    for (int64_t peer = 0; peer < n; peer++) m->of[peer].fd = -1;
    return m;
}

void ddpx_mesh_free(mesh *m) { /* the sockets are the caller's */
    for (int64_t peer = 0; peer < m->n; peer++) free(m->of[peer].in.ring), free(m->of[peer].out.ring);
    free(m->polled);
    free(m);
}

void ddpx_mesh_connect(mesh *m, int64_t peer, int fd) { m->of[peer].fd = fd; }

void ddpx_mesh_label(mesh *m, uint64_t epoch, uint64_t header) { m->now.epoch = epoch, m->now.header = header; }

int64_t ddpx_mesh_waits_for(const mesh *m) { return __atomic_load_n(&m->waits_for, __ATOMIC_RELAXED); }

const uint64_t *ddpx_mesh_wrong(const mesh *m) { return m->wrong; }

static int64_t wrong(mesh *m, int64_t peer, int64_t how) {
    m->wrong[0] = peer;
    return how;
}

/* Moves what moves without waiting. A peer that has closed may have sent all I need before, so that nothing can be sent
 * to it is wrong only once somebody waits for that. */
static int64_t move(mesh *m, int64_t peer, int sent) {
    connection *c = &m->of[peer];
    queue *q = sent ? &c->out : &c->in;
    while (q->ended < q->posted && !(sent && c->shut)) {
        message *first = &q->ring[q->ended % q->capacity];
        uint64_t head = sizeof(label), whole = head + first->says.bytes, at = q->passed > head ? q->passed - head : 0;
        if (!sent && q->passed >= head && memcmp(&c->came, &first->says, head)) {
            memcpy(m->wrong + 1, &c->came, head), memcpy(m->wrong + 4, &first->says, head);
            return wrong(m, peer, OTHER);
        }
        if (q->passed == whole) {
            q->passed = 0, q->ended++;
            continue;
        }
        struct iovec parts[2] = {{(char *)(sent ? &first->says : &c->came) + q->passed, head - q->passed},
                                 {first->at + at, first->says.bytes - at}};
        struct msghdr rest = {.msg_iov = parts, .msg_iovlen = 2};
        if (q->passed >= head) rest.msg_iov = parts + 1, rest.msg_iovlen = 1;
        ssize_t bytes = sent ? sendmsg(c->fd, &rest, MSG_DONTWAIT | MSG_NOSIGNAL) : recvmsg(c->fd, &rest, MSG_DONTWAIT);
        if (bytes < 0 && errno == EINTR) continue;
        if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return WELL;
        if (bytes <= 0 && sent) c->shut = 1;
        else if (bytes <= 0) return wrong(m, peer, CLOSED);
        else q->passed += bytes;
    }
    return WELL;
}

/* The number of the message in its direction, from 1 on. A send begins at once; what is wrong with it shows at a wait. */
uint64_t ddpx_mesh_post(mesh *m, int64_t peer, void *at, uint64_t bytes, int sent) {
    queue *q = sent ? &m->of[peer].out : &m->of[peer].in;
    if (q->posted - q->ended == q->capacity) move(m, peer, sent); /* perhaps nobody has waited for long */
    if (q->posted - q->ended == q->capacity) {
        uint64_t capacity = q->capacity ? 2 * q->capacity : 64;
        message *ring = malloc(capacity * sizeof *ring);
        if (!ring) abort();
        for (uint64_t i = q->ended; i < q->posted; i++) ring[i % capacity] = q->ring[i % q->capacity];
        free(q->ring);
        q->ring = ring, q->capacity = capacity;
    }
    label says = m->now;
    says.bytes = bytes;
    q->ring[q->posted++ % q->capacity] = (message){says, at};
    if (sent) move(m, peer, sent);
    return q->posted;
}

/* Sleeps until something can move. The kernel wakes me for LOW_BYTES, the end of a message, or that of a connection. */
static void sleep_until_some_moves(mesh *m, int64_t left_ns) {
    for (int64_t peer = 0; peer < m->n; peer++) {
        connection *c = &m->of[peer];
        short events = 0;
        if (c->out.ended < c->out.posted && !c->shut) events |= POLLOUT | POLLRDHUP;
        if (c->in.ended < c->in.posted) {
            events |= POLLIN;
            uint64_t rest = sizeof(label) + c->in.ring[c->in.ended % c->in.capacity].says.bytes - c->in.passed;
            int low = rest < LOW_BYTES ? (int)rest : LOW_BYTES;
            if (low != c->low && !setsockopt(c->fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low)) c->low = low;
        }
        m->polled[peer] = (struct pollfd){events ? c->fd : -1, events, 0};
    }
    struct timespec t = {left_ns / 1000000000LL, left_ns % 1000000000LL};
    if (ppoll(m->polled, m->n, &t, NULL) > 0)
        for (int64_t peer = 0; peer < m->n; peer++)
            if (m->polled[peer].revents & POLLRDHUP) m->of[peer].shut = 1; /* a full peer that left takes no more */
}

static int64_t arrive(mesh *m, int64_t peer, int sent, uint64_t ended, int64_t timeout_ns, outcome *result) {
    queue *q = sent ? &m->of[peer].out : &m->of[peer].in;
    if (q->ended >= ended) return WELL;
    int64_t began = now_ns(), left = timeout_ns, how;
    for (;;) {
        for (int64_t other = 0; other < m->n; other++)
            if ((how = move(m, other, 1)) || (how = move(m, other, 0))) return how;
        if (q->ended >= ended) break;
        if (sent && m->of[peer].shut) return wrong(m, peer, CLOSED);
        if (left <= 0) return wrong(m, peer, LATE);
        sleep_until_some_moves(m, left);
        left = began + timeout_ns - now_ns();
    }
    count_wait(result, peer, now_ns() - began);
    return WELL;
}

static int64_t until(mesh *m, int64_t peer, int sent, uint64_t ended, int64_t timeout_ns, outcome *result) {
    __atomic_store_n(&m->waits_for, peer, __ATOMIC_RELAXED);
    int64_t how = arrive(m, peer, sent, ended, timeout_ns, result);
    if (!how) __atomic_store_n(&m->waits_for, -1, __ATOMIC_RELAXED);
    return how;
}

/* Waits for one message, by the number that ddpx_mesh_post gave it. */
int64_t ddpx_mesh_wait(mesh *m, int64_t peer, int sent, uint64_t number, int64_t timeout_ns, outcome *result) {
    return until(m, peer, sent, number, timeout_ns, result);
}

int64_t ddpx_mesh_run(mesh *m, const operation *operations, int64_t count, int64_t timeout_ns, outcome *result) {
    for (int64_t peer = 0; peer < m->n; peer++) {
        connection *c = &m->of[peer];
        c->in.base = c->in.posted, c->out.base = c->out.posted;
    }
    for (const operation *o = operations; o < operations + count; o++) {
        int64_t how = WELL;
        switch (o->kind) {
        case SEND:
        case RECEIVE: ddpx_mesh_post(m, o->peer, o->out, o->count, o->kind == SEND); break;
        case SENT: how = until(m, o->peer, 1, m->of[o->peer].out.base + o->count, timeout_ns, result); break;
        case RECEIVED: how = until(m, o->peer, 0, m->of[o->peer].in.base + o->count, timeout_ns, result); break;
        default: ddpx_compute(o);
        }
        if (how) return how;
    }
    return WELL;
}

/* The first address of a network interface as text, IPv4 before IPv6; 0 where it has none. */
int64_t ddpx_address_of(const char *interface, char *text, int64_t room) {
    struct ifaddrs *all, *one;
    if (getifaddrs(&all)) return 0;
    int64_t found = 0;
    for (int pass = 0; pass < 2 && !found; pass++)
        for (one = all; one && !found; one = one->ifa_next) {
            if (!one->ifa_addr || strcmp(one->ifa_name, interface)) continue;
            int family = one->ifa_addr->sa_family;
            if (!pass && family == AF_INET)
                found = !!inet_ntop(family, &((struct sockaddr_in *)one->ifa_addr)->sin_addr, text, room);
            struct in6_addr *six = &((struct sockaddr_in6 *)one->ifa_addr)->sin6_addr;
            if (pass && family == AF_INET6 && !IN6_IS_ADDR_LINKLOCAL(six))
                found = !!inet_ntop(family, six, text, room);
        }
    freeifaddrs(all);
    return found;
}
