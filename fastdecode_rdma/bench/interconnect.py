"""`fastdecode bench interconnect`: latency and bandwidth of the data planes, in perftest's terms.

The loops run in C, over the very connection that an engine would use: its handshake, slots and
credits, and a 64-byte header on every message. All workers are measured at the same time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from fastdecode_rdma import host_facts
from fastdecode_rdma.attention.heartbeat import Heartbeats
from fastdecode_rdma.bench import interconnect_report as report
from fastdecode_rdma.bench import perftest
from fastdecode_rdma.bench.interconnect_arguments import add_arguments
from fastdecode_rdma.bench.interconnect_figures import Bandwidth, Latency
from fastdecode_rdma.bench.interconnect_options import Case, Settings, settings_of
from fastdecode_rdma.bench.interconnect_peer import Measurement, Outcome, Peer, at_once
from fastdecode_rdma.bench.interconnect_report import Table
from fastdecode_rdma.command_line import messages_on_stderr, unwinding_on_signals
from fastdecode_rdma.errors import FastDecodeError, TransportError
from fastdecode_rdma.transport.address import parse_url
from fastdecode_rdma.transport.base import PlaneUnavailable
from fastdecode_rdma.wire.token_file import find_token

__all__ = ["add_arguments", "run"]


@dataclass
class Result:
    """What has been measured so far."""

    tables: list[Table] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


class Bench:
    """Runs the cases in turn and prints as it goes."""

    def __init__(
        self, settings: Settings, *, skips_planes: bool, skips_kinds: bool, token: bytes | None
    ) -> None:
        """`skips_...`: what cannot be measured is said and left out, as nobody named it."""
        self.settings = settings
        self.result = Result()
        self._skips_planes = skips_planes
        self._skips_kinds = skips_kinds
        self._token = token
        self._heartbeats = Heartbeats()

    def run(self) -> None:
        """Measures all cases.

        Raises:
            FastDecodeError: a peer cannot be reached, died, or sent changed bytes.
        """
        for case in self.settings.cases:
            sizes = self.settings.sizes[case.test]
            try:
                with self._peers(case, max(sizes)) as peers:
                    self._run_case(case, peers, sizes)
            except PlaneUnavailable as error:
                if not (self._skips_planes or (case.is_bare and self._skips_kinds)):
                    raise  # it was asked for by name
                text = f"{case.plane} {case.kind} {case.test}: {error}"
                self.result.skipped.append(text)
                print(f" not measured: {text}", flush=True)

    @contextmanager
    def _peers(self, case: Case, max_bytes: int) -> Iterator[list[list[Peer]]]:
        """Connections of a case: per worker, as many as --qp says."""
        settings = self.settings
        count = settings.num_qps if case.test == "bandwidth" else 1
        peers: list[list[Peer]] = []
        try:
            for url in case.urls:
                peers.append([])
                for _ in range(count):
                    peer = Peer(
                        url,
                        heartbeats=self._heartbeats,
                        max_bytes=max_bytes,
                        depth=settings.tx_depth if case.test == "bandwidth" else 2,
                        token=self._token,
                        force=settings.force,
                        timeout_s=settings.timeout_s,
                        events=settings.events,
                        bare_kind=case.kind if case.is_bare else "",
                    )
                    peers[-1].append(peer)
            yield peers
        finally:
            for group in peers:
                for peer in group:
                    peer.close()

    def _run_case(self, case: Case, peers: list[list[Peer]], sizes: Sequence[int]) -> None:
        settings = self.settings
        firsts = [group[0] for group in peers]
        before = at_once(firsts, _both_ends, timeout_s=settings.timeout_s)
        tables = [
            Table(
                case,
                peer.name,
                peer.worker.info.transport_detail,
                peer.num_slots,
                client_link=host_facts.link_facts(peer.fd),
                server=facts,
            )
            for peer, (facts, _) in zip(firsts, before, strict=True)
        ]
        self.result.tables += tables
        total = Table(case, "all", num_slots=firsts[0].num_slots)
        if len(tables) > 1 and case.test == "bandwidth":
            self.result.tables.append(total)
        single = len(tables) == 1
        if single:
            print(self._head(tables[0]), flush=True)
        for nbytes in sizes:
            rows = self._measure(case, peers, nbytes)
            for table, row in zip(tables, rows, strict=True):
                table.rows.append(row)
                if single:
                    print(report.line_of(row, settings.report), flush=True)
            if case.test == "bandwidth":
                total.rows.append(Bandwidth.total(rows))
        after = at_once(firsts, _both_ends, timeout_s=settings.timeout_s)
        for table, (facts, ours), (later, ours_later) in zip(tables, before, after, strict=True):
            table.client_moved = host_facts.moved(ours, ours_later)
            table.server_moved = host_facts.moved(facts["counters"], later["counters"])
        self._print_rest(tables, total, single=single)
        if settings.compare and case.plane == "rdma":
            self._compare(tables, sizes)

    def _print_rest(self, tables: list[Table], total: Table, *, single: bool) -> None:
        shown = [] if single else [*tables, *([total] if total.rows else [])]
        for table in shown:
            print(self._head(table))
            for row in table.rows:
                print(report.line_of(row, self.settings.report))
        for table in tables:
            for line in report.moved_lines(table):
                print(line)
        sys.stdout.flush()

    def _head(self, table: Table) -> str:
        return report.head_of(
            table,
            report=self.settings.report,
            num_qps=self.settings.num_qps,
            depth=self.settings.tx_depth,
            check=self.settings.check,
        )

    def _measure(self, case: Case, peers: list[list[Peer]], nbytes: int) -> list[Any]:
        settings = self.settings
        everyone = [peer for group in peers for peer in group]
        what = Measurement(
            case.mode,
            nbytes,
            settings.num_iters(case.test, nbytes),
            settings.num_warm_up(nbytes),
            settings.duration_s,
            depth=settings.tx_depth
            if case.is_bare
            else min(settings.tx_depth, everyone[0].num_slots),
            check=settings.check,
            kind=case.kind,
            post_list=settings.post_list if case.test == "bandwidth" else 1,
            cq_mod=settings.cq_mod,
            events=settings.events,
        )
        outcomes = at_once(everyone, lambda peer: peer.measure(what), timeout_s=settings.timeout_s)
        for peer, outcome in zip(everyone, outcomes, strict=True):
            _check_bytes(peer, what, outcome)
        if case.test == "latency":
            return [
                Latency.of(nbytes, outcome.done, outcome.times_ns, is_half=case.is_half)
                for outcome in outcomes
            ]
        directions = 2 if case.mode in ("pingpong", "both_ways") else 1
        rows = [
            Bandwidth.of(nbytes, o.done, o.elapsed_s, peak=o.peak, directions=directions)
            for o in outcomes
        ]
        count = settings.num_qps
        return [Bandwidth.total(rows[i : i + count]) for i in range(0, len(rows), count)]

    def _compare(self, tables: list[Table], sizes: Sequence[int]) -> None:
        for table, url in zip(tables, tables[0].case.urls, strict=True):
            case = table.case
            iters = {nbytes: self.settings.num_iters(case.test, nbytes) for nbytes in sizes}
            table.perftest = perftest.beside(case, parse_url(url), iters)
            print(f" perftest beside it ({table.worker}):")
            for row in table.perftest:
                print("  " + ", ".join(f"{name} {value:g}" for name, value in row.items()))


def _both_ends(peer: Peer) -> tuple[dict[str, Any], dict[str, int]]:
    return peer.facts(), peer.counters()


def _check_bytes(peer: Peer, what: Measurement, outcome: Outcome) -> None:
    """Makes sure that all messages came as they were sent.

    Raises:
        TransportError: some did not.
    """
    if outcome.num_bad:
        place = f", the first at byte {outcome.bad_place - 1}" if outcome.bad_place else ""
        raise TransportError(
            f"{peer.name}: {outcome.num_bad} of {outcome.done} messages of {what.nbytes} bytes "
            f"came with other bytes than were sent{place}"
        )


def _settings_json(settings: Settings) -> dict[str, object]:
    values = asdict(settings)
    cases = values.pop("cases")
    values["cases"] = [f"{case['plane']} {case['kind']} {case['test']}" for case in cases]
    values["bandwidth_report"] = values.pop("report")
    values["message_bytes"] = values.pop("sizes")
    return values


def run(args: argparse.Namespace) -> int:
    """Measures, prints and writes what was asked for; what was measured before a failure too.

    Raises:
        FastDecodeError: an option cannot be used, or a peer cannot, died or changed bytes.
    """
    settings = settings_of(args)
    report.check_files(args.json, args.csv, args.plot)
    report.check_plot(args.plot)
    if settings.compare:
        perftest.check_installed(
            {perftest.tool_of(case) for case in settings.cases if case.plane == "rdma"}
        )
    bench = Bench(
        settings,
        skips_planes=args.plane is None,
        skips_kinds=args.kind is None,
        token=find_token(args.token_file),
    )
    error: str | None = "interrupted"
    try:
        with messages_on_stderr(), unwinding_on_signals():
            bench.run()
        error = None
    except FastDecodeError as exc:
        error = str(exc)
        raise
    finally:
        tables = bench.result.tables
        if args.json is not None:
            content = {
                "settings": _settings_json(settings),
                "client_machine": host_facts.machine_facts(),
                "skipped": bench.result.skipped,
                "tables": [table.json(settings.report) for table in tables],
            }
            report.write_json(args.json, "interconnect", content, error)
        if args.csv is not None:
            report.write_csv(args.csv, tables, settings.report)
    if args.plot is not None:
        report.plot(args.plot, tables)
    return 0
