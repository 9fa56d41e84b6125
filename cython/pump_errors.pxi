"""The pump's failures as typed errors."""


cdef raise_failure(fd_pump *pump, list names, int rc):
    cdef int number = pump.fail_port
    if rc == PUMP_MISUSE:
        raise LocalProtocolError(pump.fail_text.decode())
    cdef fd_port *port = pump.ports[number]
    name = names[number]
    if rc == PUMP_TIMEOUT:
        seconds = pump.timeout_ns / 1e9
        raise PortTimeout(f"attention worker {name} did not answer within {seconds:g} s",
                          worker_index=number)
    if rc == PUMP_STEP:
        code, text = port.error.code, port.error.text.decode(errors="replace")
        port.error.set = 0
        raise StepError(name, number, code, text or "refused without a reason")
    reason = port.conn.reason.decode(errors="replace")
    lost = WorkerLostError(name, reason, worker_index=number)
    if port.conn.lost == CONN_PROTOCOL:
        raise lost from RemoteProtocolError(f"attention worker {name}: {reason}")
    raise lost
