"""The remedy of each reason of an error: docs/errors.md without its links. A test compares the two."""

from typing import Final

REMEDIES: Final = {
    "INVALID_ARGUMENT": "Correct the field.",
    "UNKNOWN_WORKLOAD": "See `leasehold get workloads --all`.",
    "UNKNOWN_WORKER": "Use an id of `leasehold get workers`.",
    "UNKNOWN_GPU": "See `leasehold get gpus`.",
    "UNKNOWN_COMMAND": "See `leasehold get commands`.",
    "WORKLOAD_EXISTS": "Stop that workload, or choose another name.",
    "WORKLOAD_BUSY": "Wait for that command, or cancel it with `leasehold cancel`.",
    "WRONG_STATE": "Bring the workload into the state that the message names.",
    "GENERATION_MISMATCH": "Read the workload again, then decide.",
    "ETAG_MISMATCH": "Read the workload again, and repeat the change.",
    "WORKER_UNAVAILABLE": "Start the worker, or wait until it reconnects.",
    "WORKER_DRAINING": "Try again once it has started again, or choose another worker for a new workload.",
    "TOO_MANY_COMMANDS": "The client retries for 30 s. Then try later.",
    "NO_FREE_GPU": "Suspend or stop a workload, or choose other GPUs.",
    "INCOMPATIBLE_GPU": "Choose the same chip, or restore the workload on its former GPUs. For a stopped "
    "workload, choose a GPU that matches its spec.",
    "DUPLICATE_GPU": "Name the GPU once.",
    "INSUFFICIENT_DEVICE_MEMORY": "Free memory, or choose another GPU.",
    "INSUFFICIENT_HOST_MEMORY": "Free memory, or raise the limit.",
    "INSUFFICIENT_RESOURCES": "Stop a workload, request less, or wait as the message says.",
    "LOCK_TIMEOUT": "Try again, or with a longer `--lock-timeout`.",
    "UNSUPPORTED_STATE": "See docs/driver.md.",
    "UNSUPPORTED_DRIVER": "Update the driver: 570 suspends, 580 moves. If no driver is usable, run "
    "`leasehold doctor` on the host. The worker tries again by itself.",
    "UNSUPPORTED_CAPABILITY": "Change the request, or update.",
    "NOT_A_CUDA_PROCESS": "Stop the workload, or wait until it uses CUDA again.",
    "PERMISSION_OR_OS": "Follow the message. docs/security.md has the capabilities.",
    "TARGET_NOT_RUNNABLE": "Continue the target, or detach the tracer.",
    "TARGET_CRASHED": "Read the program's output: `leasehold logs`. Raise the limit.",
    "DRIVER_TIMEOUT": (
        "If the workload is UNKNOWN, use `leasehold restore`, which asks again. "
        "Else look for a debugger and Xid errors, and try again."
    ),
    "DRIVER_ERROR": (
        "Look up the driver's answer, which `cuda_result` in the metadata names. "
        "If the workload is UNKNOWN, use `leasehold restore`."
    ),
    "REMAP_NOT_APPLIED": "Update the driver.",
    "MEMORY_NOT_FREED": "Update the driver.",
    "MEMBER_WEDGED": (
        "Stop the workload. Nothing else helps. A program with CUDA IPC must close its imported memory "
        "before each suspend, as by a hook."
    ),
    "MEMBERS_CHANGED": "Try again.",
    "IDENTITY_MISMATCH": (
        "Look at the workload. Start the worker with the name of its certificate, and log in with the name "
        "of the token."
    ),
    "SPAWN_FAILED": (
        "Give a program that exists on the worker and that the workload's user may execute, and a working "
        "directory if any that exists there."
    ),
    "HOOK_FAILED": "Look at the program or server that the hook calls, then `leasehold wake`.",
    "EXPIRED": "Try again with a longer timeout.",
    "CANCELLED": "",
    "OUTCOME_UNKNOWN": "Wait until the worker reconnects, or look on its host.",
    "INTERRUPTED": "Look at the workload, and repeat the command.",
    "STALE_EPOCH": "Stop the older coordinator.",
    "DUPLICATE_WORKER_ID": "Don't copy state directories.",
    "PROTOCOL_VERSION": "Update the older of the two.",
    "PROTOCOL_VIOLATION": "Report the message. The sender has a defect.",
    "STORAGE_UNAVAILABLE": (
        "Repeat the request with its `request_id`. If that does not help: look at the disk and the log."
    ),
    "INVALID_TOKEN": "List or watch from the start.",
    "OUTPUT_UNAVAILABLE": (
        "For `run`: look at the file that the message names, on the worker's host. "
        "Other programs write where their caller reads."
    ),
    "INTERNAL": "Report the message, with the daemon's log.",
    "DEVICE_NODE_MISSING": "Give the container of the process all GPUs.",
    "UNSAFE_KILL": "Resume a process that a signal has stopped. Otherwise try later, or use `stop --force`.",
    "HOST_REBOOTED": "Run the workload again.",
    "CORDONED": "Choose another GPU or worker, or use `leasehold uncordon`.",
    "GPU_UNHEALTHY": "Repair the GPU, then `leasehold gpu reset-health WORKER/SLOT`.",
    "FOREIGN_PROCESS": "End or adopt the process, or use `--allow-foreign`.",
    "ALREADY_REGISTERED": "Use that workload.",
    "UNKNOWN_PROCESS": "Look up the pid with `nvidia-smi`.",
    "NOT_PERMITTED": (
        "Ask an admin for `leasehold access grant`; on the host: call as root, or change the worker's "
        "settings."
    ),
    "ALREADY_RELEASED": "Nothing.",
    "NOTHING_FREED": "Choose another policy, or use `--force`.",
    "STATE_WOULD_BE_LOST": (
        "Choose another policy, let the program serve a kernel (docs/kernels.md), or use `--force`."
    ),
    "KERNEL_NOT_READY": "Try again later.",
    "KERNEL_FAILED": "Read the application's output: `leasehold logs`.",
    "CRIU_FAILED": "Read the log, or choose another policy.",
    "CHECKPOINT_CORRUPT": "Name an older checkpoint, and delete this one.",
    "CHECKPOINT_INCOMPATIBLE": "Name a suitable checkpoint, or restore the environment that made it.",
    "UNKNOWN_CHECKPOINT": "See `leasehold get checkpoints`.",
    "CHECKPOINT_IN_USE": "Restore or stop the workload first, or use `leasehold rm checkpoint ID --force`.",
    "INSUFFICIENT_DISK": "Delete checkpoints, or raise the limit.",
    "DUPLICATE_WORKER_NAME": "Rename one of the two workers: `leasehold worker --name`.",
    "DUPLICATE_WORKER_GPU": (
        "Run one worker per host. If one is gone: `leasehold rm worker`. If the GPU has moved: `leasehold"
        " gpu unbind`."
    ),
    "TOO_MANY_WORKERS": "Delete workers that are gone: `leasehold rm worker`.",
    "WORKER_CONNECTED": "Stop the worker first.",
    "WORKER_DELETED": "Look at the worker's host, if there is one.",
    "TOO_MANY_CALLS": (
        "End unused watches and `logs -f`. The client retries, but only once for a new watch or output "
        "above `caller_streams`."
    ),
    "NOT_READY": (
        "Wait with `leasehold wait`, then try again. The verbs `suspend` and `remap` do so by themselves."
    ),
    "REQUEST_ID_REUSED": "Repeat a request unchanged, and give another request another id.",
    "STORAGE_DAMAGED": (
        "Check the disk, then restore the newest backup with `leasehold backup restore`. "
        "A damaged row can be deleted instead."
    ),
    "UNKNOWN_HOLD": "Suspend again, or leave out the hold.",
    "UNAUTHENTICATED": (
        "Call as the coordinator's user, or send its token (docs/security.md). Get another certificate "
        "with a join token."
    ),
    "UNKNOWN_CERTIFICATE": "List certificates and blocked identities with `leasehold ca list --all`.",
    "TOO_MANY_BLOCKS": "Unblock some identities with `leasehold ca unblock`.",
    "AUTHORITY_IN_USE": (
        "Look at `leasehold ca list`. Wait for the expiry of the certificates, or end the trust in them "
        "with `--force`."
    ),
    "JOIN_REFUSED": (
        "Create another token: `leasehold token create`. If the request was sent before: join again, "
        "which signs a new one."
    ),
    "TOO_MANY_JOIN_TOKENS": "Delete some tokens: `leasehold token delete`, or wait until some expire.",
    "UNKNOWN_JOIN_TOKEN": "See `leasehold token list`.",
    "ALREADY_ENROLLED": "Take another name, or create the token with `--replace`.",
    "CERTIFICATE_CLONED": (
        "Find the other host. Then join again with a token of `leasehold token create --replace`."
    ),
    "UNKNOWN_BINDING": "List the roles with `leasehold access list`.",
    "TOO_MANY_BINDINGS": "Revoke some roles with `leasehold access revoke`.",
    "CALL_TIMEOUT": "Look before you repeat the call, or repeat it with the same `request_id`.",
    "ISSUER_UNAVAILABLE": "Try again. If that does not help: see the coordinator's log.",
}
"""By reason. A reason with several rows in docs/errors.md has the remedy of its first row."""
