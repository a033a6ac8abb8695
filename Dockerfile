# run_trainer on a CPU: docker build -t run-trainer . && docker run --rm -v "$PWD:/work" run-trainer --help
FROM python:3.11-slim

COPY . /source
RUN pip install --no-cache-dir -c /source/constraints.txt /source \
    && cp -r /usr/local/share/run-trainer /opt/run-trainer \
    && rm -rf /source

WORKDIR /work
ENTRYPOINT ["run-trainer"]
CMD ["--help"]
