/* The life of one command between a coordinator and a worker, for spin. README.md says what is left out.
 *
 * Each side has a disk and a memory. What goes to disk waits in memory for its batch, which is one commit. A
 * crash, possible between any two steps, loses the memory with the batch and breaks the session; a session that
 * breaks loses what is in flight. Crashes and breaks are bounded, so every run comes to rest, and there
 * everything must have ended.
 */

#define CRASHES 2             /* of each side */
#define BREAKS  2             /* of sessions, by the network */

/* Where a command stands, on either disk. */
#define NONE      0
#define PENDING   1           /* coordinator: stored, and certainly not sent */
#define SENT      2           /* coordinator: may have been sent */
#define HELD      3           /* worker: taken in */
#define BEGUN     4           /* worker: its intent is written down */
#define SUCCEEDED 5
#define FAILED    6
#define CANCELLED 7
#define EXPIRED   8
#define ended(s)  (s >= SUCCEEDED)

mtype = { COMMAND, CANCEL, ACK, ACCEPTED, OUTCOME };
chan down = [2] of { mtype, byte };     /* with the epoch */
chan up   = [2] of { mtype, byte };     /* with the outcome */

/* The coordinator's disk. */
byte stored = NONE;
bool accepted;                /* the worker said that it has the command */
bool cancel_wanted;
byte epoch_given;

/* The worker's disk. */
byte journal = NONE;
bool acknowledged;
byte epoch_seen;

/* The world. */
byte done;                    /* how often the command was carried out */
bool overdue;

/* Memory, lost by a crash or a break. */
bool connected;
byte session_epoch;
bool sent_now, cancel_sent_now, told_now;
bool acted;                   /* worker: it has carried out what it began */
byte batch;                   /* coordinator: the outcome that waits for its batch */
bool noted;                   /* coordinator: the worker has the command; nothing waits for this note */
bool ack_due;                 /* coordinator: the outcome is on disk, and not acknowledged yet */
bool taken;                   /* worker: the command waits for its batch */
bool ack_noted;               /* worker: acknowledged; nothing waits for this note */

#define forget_coordinator()  batch = NONE; noted = false; ack_due = false
#define forget_worker()       taken = false; ack_noted = false; acted = false

byte coordinator_crashes = CRASHES, worker_crashes = CRASHES, breaks = BREAKS;

inline lose_session() {
    connected = false; sent_now = false; cancel_sent_now = false; told_now = false;
    do
    :: nempty(down) -> down?_, _
    :: empty(down) && nempty(up) -> up?_, _
    :: empty(down) && empty(up) -> break
    od
}

/* hello with what the journal holds, the epoch on both disks, welcome, and what follows from hello. */
inline connect() {
    epoch_given++; session_epoch = epoch_given; epoch_seen = session_epoch; connected = true;
    if
    :: taken -> journal = HELD; taken = false       /* hello waits until all is in the journal */
    :: else -> skip
    fi;
    if
    :: stored == SENT && batch == NONE && journal == NONE && (accepted || noted) -> stored = FAILED
    :: stored == SENT && batch == NONE && journal == NONE && !accepted && !noted && overdue -> stored = EXPIRED
    :: else -> skip
    fi
}

active proctype coordinator() {
    mtype kind; byte state;
end: do
    :: atomic { stored == NONE -> stored = PENDING }
    :: atomic { !connected -> connect() }
    :: atomic { stored == PENDING && overdue -> stored = EXPIRED }
    :: atomic { stored == PENDING && cancel_wanted -> stored = CANCELLED }
#ifdef MUTATION_SEND_BEFORE_STORE
    :: atomic { connected && stored == PENDING && !sent_now && nfull(down) ->
           sent_now = true; down!COMMAND, session_epoch }
#else
    :: atomic { connected && stored == PENDING -> stored = SENT }
#endif
    :: atomic { connected && stored == SENT && !sent_now && nfull(down) ->
           sent_now = true; down!COMMAND, session_epoch }
    :: atomic { connected && stored == SENT && sent_now && cancel_wanted && !cancel_sent_now && nfull(down) ->
           cancel_sent_now = true; down!CANCEL, session_epoch }
    :: up?kind, state ->
        if
        :: kind == ACCEPTED -> noted = true
        :: kind == OUTCOME ->
#ifdef MUTATION_ACK_BEFORE_STORE
            if
            :: atomic { connected && nfull(down) -> down!ACK, 0 }
            :: !connected || full(down) -> skip
            fi;
            if
            :: atomic { stored == SENT -> stored = state }
            :: atomic { coordinator_crashes > 0 -> coordinator_crashes--; forget_coordinator(); lose_session() }
            fi
#else
            atomic {
                if
                :: ended(stored) -> ack_due = true
                :: !ended(stored) && batch == NONE -> batch = state
                :: !ended(stored) && batch != NONE -> skip        /* acknowledged with the one that waits */
                fi
#ifdef MUTATION_TOLD_BEFORE_BATCH
                ; ack_due = true
#endif
            }
#endif
        fi
    :: atomic { batch != NONE -> stored = batch; batch = NONE; accepted = accepted || noted; ack_due = true }
    :: atomic { noted && !accepted && batch == NONE -> accepted = true }
    :: atomic { ack_due && connected && nfull(down) -> ack_due = false; down!ACK, 0 }
    :: atomic { ack_due && !connected -> ack_due = false }
    :: atomic { coordinator_crashes > 0 -> coordinator_crashes--; forget_coordinator(); lose_session() }
    :: atomic { breaks > 0 && connected -> breaks--; lose_session() }
    od
}

/* A coordinator that was replaced and does not know it: what it sends carries an older epoch. */
active proctype deposed() {
    byte left = 2;
end: do
    :: atomic { left > 0 && connected && session_epoch > 1 && nfull(down) ->
           left--; down!COMMAND, session_epoch - 1 }
    od
}

active proctype worker() {
    mtype kind; byte epoch;
end: do
    :: atomic { nempty(down) ->          /* a hello waits until what was read before is in the journal */
        down?kind, epoch;
        if
        :: kind == ACK -> ack_noted = true
#ifndef MUTATION_NO_EPOCH
        :: kind != ACK && epoch != epoch_seen -> skip
        :: kind == COMMAND && epoch == epoch_seen && journal == NONE && !taken ->
#else
        :: kind == COMMAND && journal == NONE && !taken ->
#endif
            assert(epoch == epoch_seen);                        /* no obedience to an older epoch */
#ifdef MUTATION_ACT_BEFORE_JOURNAL
            done++;
            if
            :: journal = SUCCEEDED
            :: worker_crashes > 0 -> worker_crashes--; forget_worker(); lose_session()
            fi
#else
            taken = true
#endif
        :: kind == COMMAND && epoch == epoch_seen && (journal != NONE || taken) ->
            told_now = false                                    /* answered with where it stands */
        :: kind == CANCEL && epoch == epoch_seen && journal <= HELD -> journal = CANCELLED; taken = false
        :: kind == CANCEL && epoch == epoch_seen && journal > HELD -> skip     /* too late */
        fi }
    :: atomic { taken -> taken = false; journal = HELD;
           if
           :: nfull(up) && connected -> up!ACCEPTED, 0
           :: skip                                              /* crashed before it was told */
           fi }
    :: atomic { ack_noted && !acknowledged -> acknowledged = true }
    :: atomic { journal == HELD -> journal = BEGUN }
    :: atomic { journal == BEGUN && !acted -> done++; acted = true }
    :: atomic { journal == BEGUN && acted -> journal = SUCCEEDED; acted = false }
    :: atomic { connected && ended(journal) && !acknowledged && !ack_noted && !told_now && nfull(up) ->
           told_now = true; up!OUTCOME, journal }
    :: atomic { worker_crashes > 0 ->                           /* and comes back: begun ends as it is found */
           worker_crashes--; forget_worker(); lose_session();
           if
#ifndef MUTATION_BEGIN_AGAIN
           :: journal == BEGUN && done == 0 -> journal = FAILED
           :: journal == BEGUN && done > 0 -> journal = SUCCEEDED
#endif
           :: else -> skip
           fi }
    od
}

active proctype world() {
    if
    :: cancel_wanted = true
    :: skip
    fi;
    if
    :: overdue = true
    :: skip
    fi
}

active proctype judge() {
end: do
    :: atomic { done > 1 -> assert(false) }                                 /* done twice */
    :: atomic { stored == SUCCEEDED && done != 1 -> assert(false) }         /* told, and not done */
    :: atomic { stored > SUCCEEDED && done > 0 -> assert(false) }           /* done, and told that it was not */
    :: timeout ->                                                           /* at rest */
        assert(ended(stored));                                              /* an outcome is lost */
        assert(!ended(journal) || acknowledged);
        break
    od
}
