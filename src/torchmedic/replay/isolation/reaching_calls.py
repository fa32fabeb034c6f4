"""The calls that reach outside of the process: those that a replay leaves out, and those that it refuses."""

from __future__ import annotations

# By module and class: what is left out, and what is refused. A module that nobody has loaded is not loaded for it.
LEFT_OUT = {
    "atexit": "register unregister",
    "os": "remove unlink rename renames replace rmdir removedirs mkdir link symlink chmod chown lchown utime truncate "
    "ftruncate umask mkfifo setxattr fsync fdatasync",
    "numpy": "save savez savez_compressed savetxt",
    "shutil": "rmtree move copy copy2 copyfile copytree copymode copystat",
    "signal": "alarm setitimer",
    "queue.Queue": "put put_nowait task_done",
    "threading.Semaphore": "acquire release __enter__ __exit__",
    "threading.BoundedSemaphore": "release",
    "threading.Event": "set clear",
    "multiprocessing.synchronize.Event": "set clear",
    "multiprocessing.queues.Queue": "put put_nowait",
    "multiprocessing.queues.SimpleQueue": "put",
    "gzip.GzipFile": "write",
    "bz2.BZ2File": "write",
    "lzma.LZMAFile": "write",
    "torch.utils.tensorboard.writer.FileWriter": "add_event add_summary",
    "lightning.pytorch.core.module.LightningModule": "log log_dict",
    "pytorch_lightning.core.module.LightningModule": "log log_dict",
}
_CALLS = "send sendall sendto sendmsg sendfile recv recv_into recvfrom recvfrom_into recvmsg connect connect_ex accept"
REFUSED = {
    "builtins": "input",
    "os": "_exit abort system",
    "signal": "raise_signal",
    "threading.Thread": "start",
    "threading.Barrier": "wait abort reset",
    "queue.Queue": "get get_nowait join",
    "multiprocessing.queues.Queue": "get get_nowait",
    "multiprocessing.queues.SimpleQueue": "get",
    "multiprocessing.connection._ConnectionBase": "send send_bytes recv recv_bytes recv_bytes_into",
    "multiprocessing.pool.Pool": "_check_running",
    "multiprocessing.process.BaseProcess": "start terminate kill",
    "concurrent.futures.thread.ThreadPoolExecutor": "submit",
    "concurrent.futures.process.ProcessPoolExecutor": "submit",
    "socket.socket": _CALLS,
    "ssl.SSLSocket": f"{_CALLS} read write",
    # A job is joined and left once; the other ranks would not meet this one a second time.
    "torch.distributed": "TCPStore",
    "torch.distributed.ProcessGroup": "shutdown abort",
    "torch.distributed.distributed_c10d": "rendezvous _new_process_group_helper",
}
EVENTS = frozenset(
    "subprocess.Popen os.system os.exec os.fork os.forkpty os.posix_spawn os.spawn os.kill os.killpg pty.spawn "
    "os.remove os.rename os.rmdir os.mkdir os.link os.symlink os.truncate os.chmod os.chown os.lchown os.utime "
    "os.setxattr os.removexattr socket.connect socket.bind socket.sendto socket.sendmsg socket.getaddrinfo "
    "sqlite3.connect builtins.input syslog.syslog webbrowser.open".split()
)
