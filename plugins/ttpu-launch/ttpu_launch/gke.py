"""Google Kubernetes Engine: writes the YAML of a JobSet that runs a command on every host of every TPU slice, for
`kubectl apply -f`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ttpu_core.errors import LaunchError
from ttpu_core.processes import DEFAULT_TIMEOUT
from ttpu_core.sharding.hardware import Topology
from ttpu_launch.options import DEFAULT_GRACE, own_options

# Labels of nodes: cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus.
ACCELERATORS: Mapping[str, str] = MappingProxyType(
    {
        "v4": "tpu-v4-podslice",
        "v5e": "tpu-v5-lite-podslice",
        "v5p": "tpu-v5p-slice",
        "v6e": "tpu-v6e-slice",
        "tpu7x": "tpu7x",
    }
)

CHIPS_OF_HOSTS = (1, 4, 8)
"""Chips per host in GKE's machine types: …-1t, …-4t and (v5e and v6e) …-8t."""

# Valid names in Kubernetes (kubernetes.io/docs/concepts/overview/working-with-objects/names). A JobSet's name must be
# shorter, because it is part of the names of its Jobs and pods.
NAMES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "name": (
            "[a-z]([a-z0-9-]{0,38}[a-z0-9])?",
            "up to 40 lower-case letters, digits and '-', beginning with a letter and not ending with '-',",
        ),
        "namespace": (
            "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
            "up to 63 lower-case letters, digits and '-', neither beginning nor ending with '-',",
        ),
        "secret": (
            "[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?",
            "up to 253 lower-case letters, digits, '-' and '.', beginning and ending with a letter or digit,",
        ),
    }
)

# A JobSet is one Job per slice with one pod per host. GKE numbers the pods and, with several slices, the slices
# (TPU_WORKER_ID, MEGASCALE_*), and jax.distributed reads these numbers. backoffLimit 0: a failed pod fails its slice,
# and the JobSet restarts up to maxRestarts times. The annotation makes each slice one node pool
# (github.com/kubernetes-sigs/jobset, docs/concepts).
TEMPLATE = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
  namespace: {namespace}
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: {restarts}
  replicatedJobs:
    - name: slice
      replicas: {slices}
      template:
        spec:
          completions: {hosts}
          parallelism: {hosts}
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {patience}
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: {accelerator}
                cloud.google.com/gke-tpu-topology: {size}
              hostNetwork: true
              dnsPolicy: ClusterFirstWithHostNet
              containers:
                - name: ttpu
                  image: {image}
                  command: {command}
                  env: {environment}
                  ports:
                    - containerPort: 8471  # between the TPU hosts of a slice
                    - containerPort: 8080  # between slices
                  resources:
                    requests:
                      google.com/tpu: {chips}
                    limits:
                      google.com/tpu: {chips}
"""


@dataclass(frozen=True)
class JobSet:
    """A job on GKE. `chips_per_host` of None selects the usual machine: one host for a slice that fits it, else
    hosts of 4 chips. A variable whose value is None is read from the Kubernetes Secret `secret`, under its own
    name."""

    command: tuple[str, ...]
    topology: Topology
    image: str
    name: str = "ttpu"
    namespace: str = "default"
    restarts: int = 0
    chips_per_host: int | None = None
    environment: tuple[tuple[str, str | None], ...] = ()
    secret: str | None = None
    timeout: int = DEFAULT_TIMEOUT
    grace: float = DEFAULT_GRACE
    backend: str | None = None

    def yaml(self) -> str:
        """The manifest. Strings are written as JSON, which is valid YAML.

        Raises:
            LaunchError: an invalid Kubernetes name, hosts that do not divide the slice, or a variable without a
                value and without a Secret.
        """
        for what, text in (("name", self.name), ("namespace", self.namespace), ("secret", self.secret)):
            form, said = NAMES[what]
            if text is not None and not re.fullmatch(form, text):
                raise LaunchError(f"--{what} {text!r} was given, but Kubernetes takes {said} here: correct it.")
        if not self.image.strip():
            raise LaunchError("--image was given, but it is empty: pass an image in which ttpu is installed.")
        chips = self._chips()
        return TEMPLATE.format(
            name=_scalar(self.name),
            namespace=_scalar(self.namespace),
            patience=max(30, math.ceil(self.grace) + 20),
            restarts=self.restarts,
            slices=self.topology.slices,
            hosts=self.topology.chips_per_slice // chips,
            accelerator=ACCELERATORS[self.topology.chip.name],
            size=_scalar("x".join(map(str, self.topology.size))),
            image=_scalar(self.image),
            command=_scalar(
                [
                    *("ttpu", "launch", "--tpu-pod", *own_options(self.timeout, self.grace, self.backend), "--"),
                    *map(_unexpanded, self.command),
                ]
            ),
            environment=_scalar([self._variable(name, value) for name, value in self.environment]),
            chips=chips,
        )

    def _variable(self, name: str, value: str | None) -> dict[str, object]:
        if value is not None:
            return {"name": name, "value": _unexpanded(value)}
        if self.secret is None:
            raise LaunchError(
                f"--env {name} was given with --gke, but values of this machine are not written into a manifest: write "
                f"--env {name}=VALUE, or create a Kubernetes Secret with the key {name} and pass its name as --secret."
            )
        return {"name": name, "valueFrom": {"secretKeyRef": {"name": self.secret, "key": name}}}

    def _chips(self) -> int:
        """Chips per host."""
        topology, given = self.topology, self.chips_per_host
        if given is None:
            return topology.chips_per_slice // (topology.num_hosts // topology.slices)
        if given not in CHIPS_OF_HOSTS or given > topology.chip.chips_per_host or topology.chips_per_slice % given:
            allowed = [
                str(chips)
                for chips in CHIPS_OF_HOSTS
                if chips <= topology.chip.chips_per_host and topology.chips_per_slice % chips == 0
            ]
            raise LaunchError(
                f"--chips-per-host {given} was given, but hosts of {topology.chip.name} for {topology.slice_name} have "
                f"{' or '.join(allowed)} chips: pass one of those, or leave it out."
            )
        return given


def _unexpanded(text: str) -> str:
    """The text with "$" escaped, so that Kubernetes does not expand $(NAME)."""
    return text.replace("$", "$$")


def _scalar(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
