"""A server that answers as vLLM does, as far as `toolkit.train.vllm_server` asks it, by a tiny model in Transformers.

Nothing of it is made up: it has the weights of the files that it is told to load, and the log-probabilities that it
draws by. Flags make it one that lacks something, or that dies.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ranks import Ranks

VERSION = "0.33.0"
_PORT_FILE = "port-of-server.txt"


@contextmanager
def answering(ranks: Ranks, folder: Path, *flags: str) -> Iterator[str]:
    """The address of a server in a process of its own; of its log every request is a line: `requests.txt`."""
    place = folder / _PORT_FILE
    place.unlink(missing_ok=True)
    (folder / "requests.txt").unlink(missing_ok=True)
    server = ranks.start(folder, *flags, entry="answering")
    try:
        while not place.is_file() or not place.read_text():
            assert server.running(), server.wait().stderr
            time.sleep(0.02)
        yield f"http://127.0.0.1:{place.read_text()}"
    finally:
        if server.running():
            os.kill(server.pids[0], 9)
        server.wait()


def names(address: str) -> list[str]:
    """Of the models and adapters that a server has."""
    with urllib.request.urlopen(f"{address}/v1/models") as answer:
        return [each["id"] for each in json.load(answer)["data"]]


def main(arguments: Sequence[str]) -> int:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama")
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--without", action="append", default=[], help="lora, updates, development, sight, tokens")
    parser.add_argument("--raw", action="store_true", help="log-probabilities before temperature and top-p")
    parser.add_argument("--dies-after", type=int, help="so many completions")
    settings = parser.parse_args(arguments)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"model": _Model(settings)}))
    server.daemon_threads = True
    Path(_PORT_FILE).write_text(str(server.server_address[1]))
    server.serve_forever()
    return 0


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Model:
    """The weights, and what is asked of them, one request after the other."""

    def __init__(self, settings: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.settings, self.lock, self.completions = settings, threading.Lock(), 0
        self.tokenizer = AutoTokenizer.from_pretrained(settings.model)
        torch.set_num_threads(1)
        self.models: dict[str, Any] = {}
        self.models[settings.model] = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32).eval()
        self.folders: dict[str, str] = {}

    def get(self, path: str) -> Any:
        if path == "/version":
            return {"version": VERSION}
        base = {"id": self.settings.model, "root": self.settings.model, "parent": None}
        cards = [base | {"max_model_len": self.settings.longest}]
        cards += [{"id": name, "root": root, "parent": base["id"]} for name, root in self.folders.items()]
        return {"data": cards}

    def post(self, path: str, content: dict[str, Any]) -> Any:
        if path == "/tokenize":
            ids = self.tokenizer(content["prompt"], add_special_tokens=content["add_special_tokens"])["input_ids"]
            return {"tokens": ids[::-1] if "tokens" in self.settings.without else ids}
        if path == "/v1/completions":
            return self.complete(content)
        if path == "/v1/load_lora_adapter" and "updates" not in self.settings.without:
            return self.load_adapter(content["lora_name"], Path(content["lora_path"]))
        if path == "/v1/unload_lora_adapter":
            del self.folders[content["lora_name"]], self.models[content["lora_name"]]
            return None
        if path == "/collective_rpc" and "development" not in self.settings.without:
            return self.reload(content)
        if path == "/reset_prefix_cache":
            return {"success": True}
        raise LookupError(path)

    def load_adapter(self, name: str, folder: Path) -> None:
        from peft import PeftModel

        if "lora" in self.settings.without:
            raise _Refused(500, "Call to add_lora method failed: LoRA is not enabled.")
        if "sight" in self.settings.without or not folder.is_dir():
            raise _Refused(404, f"Loading lora {name} failed: No adapter found for {folder}")
        config = json.loads((folder / "adapter_config.json").read_text())
        if (rank := max([config["r"], *config.get("rank_pattern", {}).values()])) > self.settings.rank:
            raise _Refused(500, f"LoRA rank {rank} is greater than max_lora_rank {self.settings.rank}.")
        if not (folder / "adapter_model.safetensors").is_file():
            raise _Refused(500, f"{folder} doesn't contain tensors")
        base = copy.deepcopy(self.models[self.settings.model])
        self.models[name] = PeftModel.from_pretrained(base, str(folder)).eval()
        self.folders[name] = str(folder)

    def reload(self, content: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        if "method" not in content:
            raise _Refused(400, "Missing 'method' in request body")
        assert content["method"] == "reload_weights"
        (file,) = Path(content["kwargs"]["weights_path"]).glob("*.safetensors")
        model = self.models[self.settings.model]
        lost = model.load_state_dict(load_file(file), strict=False)
        assert not lost.unexpected_keys and set(lost.missing_keys) <= {"lm_head.weight"}
        model.tie_weights()

    def complete(self, content: dict[str, Any]) -> Any:
        import torch
        from transformers import TopPLogitsWarper

        self.completions += 1
        if self.settings.dies_after and self.completions > self.settings.dies_after:
            os._exit(1)
        if content["model"] not in self.models:
            raise _Refused(404, f"The model `{content['model']}` does not exist.")
        model, prompt, longest = self.models[content["model"]], content["prompt"], content["max_tokens"]
        if max(prompt) >= model.config.vocab_size:
            raise _Refused(400, f"Token id {max(prompt)} is out of vocabulary")
        if len(prompt) + longest > self.settings.longest:
            raise _Refused(400, f"This model's maximum context length is {self.settings.longest} tokens.")
        temperature, count = content["temperature"], content.get("n", 1)
        draws = [torch.Generator().manual_seed(content.get("seed", 0) + number) for number in range(count)]
        ids, log_probs, likeliest = torch.tensor([prompt] * count), [], []
        with torch.no_grad():
            for _ in range(longest):
                logits = model(input_ids=ids).logits[:, -1]
                scores = logits / temperature if temperature else logits
                if content.get("top_p", 1.0) < 1:
                    scores = TopPLogitsWarper(content["top_p"])(ids, scores)
                shares = zip(scores.softmax(-1), draws, strict=True)
                drawn = [torch.multinomial(share, 1, generator=number) for share, number in shares]
                token = torch.stack(drawn) if temperature else scores.argmax(-1, keepdim=True)
                told = (logits if self.settings.raw else scores).log_softmax(-1)
                log_probs.append(told.gather(1, token)[:, 0])
                likeliest.append(told.max(-1).values)
                ids = torch.cat([ids, token], 1)
        choices = []
        for number in range(count):
            given = ids[number, len(prompt) :].tolist()
            end = next(
                (at for at, token in enumerate(given) if token in content.get("stop_token_ids", [])), longest - 1
            )
            told = {"token_logprobs": [float(each[number]) for each in log_probs][: end + 1]}
            told["top_logprobs"] = [{"a token": float(each[number])} for each in likeliest][: end + 1]
            choices.append({"index": number, "token_ids": given[: end + 1], "logprobs": told})
        return {"choices": choices[::-1]}


class _Handler(BaseHTTPRequestHandler):
    model: _Model

    def do_GET(self) -> None:
        self.answer(200, self.model.get(self.path))

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        with self.model.lock:
            with open("requests.txt", "a", encoding="utf-8") as file:
                file.write(json.dumps({"path": self.path, **content}) + "\n")
            try:
                self.answer(200, self.model.post(self.path, content))
            except LookupError:
                self.answer(404, {"detail": "Not Found"})
            except _Refused as refused:
                self.answer(refused.status, {"error": {"message": str(refused), "code": refused.status}})

    def answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode() if content is not None else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass
