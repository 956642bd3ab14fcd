"A real kernel, as a notebook has it."
from jupyter_client.manager import KernelManager


class Kernel:
    def __init__(self, cwd=None):
        self.km = KernelManager(kernel_name="python3")
        self.km.start_kernel(**({"cwd": str(cwd)} if cwd else {}))
        self.kc = self.km.client()
        self.kc.start_channels()
        self.kc.wait_for_ready(60)

    pid = property(lambda self: self.km.provisioner.pid)

    def messages(self, code, timeout=120, person=True):
        "(the reply, every message that came meanwhile); a front end without a `person` can't be asked anything, and a cell that starts a run waits for its end there"
        came = []
        return self.kc.execute_interactive(code, allow_stdin=person, output_hook=came.append, timeout=timeout)["content"], came

    def ask(self, code, timeout=120):
        "(status, what was printed or shown, error text), where nobody can answer"
        reply, came = self.messages(code, timeout, person=False)
        of = lambda *kinds: [m["content"] for m in came if m["msg_type"] in kinds]
        shown = [c["text"] if "text" in c else c["data"].get("text/plain", "") for c in of("stream", "execute_result", "display_data")]
        return reply["status"], "".join(shown), "\n".join("\n".join(c["traceback"]) for c in of("error"))

    def run(self, code, timeout=120):
        "The last line that the code prints, '' for none; an error in the cell is an error here"
        reply, came = self.messages(code, timeout)
        assert reply["status"] == "ok", reply
        said = "".join(m["content"]["text"] for m in came if m["msg_type"] == "stream").strip()
        return said.splitlines()[-1] if said else ""

    def complete(self, code, pos=None):
        msg = self.kc.complete(code, len(code) if pos is None else pos)
        while True:
            reply = self.kc.get_shell_msg(timeout=30)
            if reply["parent_header"].get("msg_id") == msg: return reply["content"]["matches"]

    def restart(self):
        "At once, as the button does it"
        self.km.restart_kernel(now=True)
        self.kc.wait_for_ready(60)

    def kill(self):
        "SIGKILL for the kernel and its whole process group"
        self.kc.stop_channels()
        if self.km.is_alive(): self.km.shutdown_kernel(now=True)
