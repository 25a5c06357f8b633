"""The process of one local rank, `python -m distmega.launch.local_rank FD`: orders in, reports out,
on socket FD.

The first message is (rank, Job). When the socket ends, the launcher is gone and the process ends at
once, even if its target hangs in a collective. Next: launch/worker.py does the work.
"""

import gc
import os
import pickle
import queue
import socket
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from distmega.launch.contract import Job
from distmega.launch.host.reports import AskPosition, Finish, Position, Report, StoreOpened
from distmega.launch.host.sockets import LOOPBACK, listen_at
from distmega.launch.host.stores import HashStore, Store, reach_store, serve_store
from distmega.launch.worker import (
    RankRun,
    close_group,
    make_context,
    start_logging,
    supervised_timeout_s,
)


class LocalRank:
    """A rank's end of the socket. Reports come from two threads, hence the lock."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._store_address: queue.SimpleQueue[StoreOpened] = queue.SimpleQueue()
        self._finish = threading.Event()
        self._rank, self._job = self._receive_order()
        context = make_context(
            rank=self._rank,
            world_size=self._job.num_ranks,
            local=(self._rank, self._job.num_ranks),
            node=socket.gethostname(),
            kind=self._job.device,
            index=self._rank,
            timeout_s=self._job.timeout_s,
        )
        self._run = RankRun(
            context,
            self._job,
            join=self._join_store,
            collective_timeout_s=supervised_timeout_s(self._job),
        )

    def work(self) -> None:
        """Run the job; return when the launcher says that every rank is done."""
        start_logging(self._rank)
        threading.Thread(target=self._obey, name="orders", daemon=True).start()
        self._run.run(self._report)
        self._finish.wait()  # never comes if a rank failed: an open group spares its peers errors
        close_group()

    def _join_store(self) -> Store:
        if self._job.num_ranks == 1:
            return HashStore()
        if self._rank > 0:
            address = self._store_address.get()
            return reach_store(address.host, address.port, self._job.start_timeout_s)
        store = serve_store(LOOPBACK, self._job.start_timeout_s)
        self._report(StoreOpened(rank=0, host=LOOPBACK, port=store.port))
        return store

    def _obey(self) -> None:
        while True:
            match self._receive():
                case StoreOpened() as address:
                    self._store_address.put(address)
                case AskPosition():
                    self._report(Position(rank=self._rank, where=self._run.position()))
                case Finish():
                    self._finish.set()

    def _receive_order(self) -> tuple[int, Job]:
        order: tuple[int, Job] = self._receive()
        return order

    def _receive(self) -> Any:
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):  # at its end, or in the midst of an order
            os._exit(1)

    def _report(self, report: Report) -> None:
        with self._lock:
            self._connection.send_bytes(pickle.dumps(report))


def main() -> None:
    file_descriptor = int(sys.argv[1])
    os.set_inheritable(file_descriptor, False)
    listen_at(LOOPBACK)  # whatever the host's name resolves to
    gc.freeze()  # what torch has made stays: a collection that looks at it takes 0.1 s
    LocalRank(Connection(file_descriptor)).work()


if __name__ == "__main__":
    main()
