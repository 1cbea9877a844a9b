// A client in another language: it knows the protos and a gRPC library, and nothing of Leasehold's Python.
//
//   node client.js ADDRESS PROTOS RPC_PROTOS CREDENTIALS
//
// PROTOS and RPC_PROTOS are the folders of Leasehold's protos and of google/rpc, and CREDENTIALS is that of ca.pem and
// client.token. Prints one JSON object.
'use strict';

const fs = require('fs');
const path = require('path');
const modules = path.join(process.cwd(), 'node_modules');
const grpc = require(path.join(modules, '@grpc/grpc-js'));
const loader = require(path.join(modules, '@grpc/proto-loader'));
const protobuf = require(path.join(modules, 'protobufjs'));

const [address, protos, rpcProtos, credentialsFolder] = process.argv.slice(2);
const DEADLINE_MS = 30000;

const SERVICES = ['fleet_service', 'workload_service', 'command_service', 'event_service'];
const definition = loader.loadSync(
  SERVICES.map((name) => `leasehold/v1/${name}.proto`),
  { includeDirs: [protos], keepCase: true, enums: String, longs: String, defaults: true, oneofs: true },
);
const { leasehold } = grpc.loadPackageDefinition(definition);
const token = fs.readFileSync(path.join(credentialsFolder, 'client.token'), 'utf8').trim();
const credentials = grpc.credentials.combineChannelCredentials(
  grpc.credentials.createSsl(fs.readFileSync(path.join(credentialsFolder, 'ca.pem'))),
  grpc.credentials.createFromMetadataGenerator((_, callback) => {
    const metadata = new grpc.Metadata();
    metadata.set('authorization', `Bearer ${token}`);
    callback(null, metadata);
  }),
);
const fleet = new leasehold.v1.FleetService(address, credentials);
const workloads = new leasehold.v1.WorkloadService(address, credentials);
const commands = new leasehold.v1.CommandService(address, credentials);
const events = new leasehold.v1.EventService(address, credentials);

const details = new protobuf.Root();
details.resolvePath = (_, target) =>
  path.isAbsolute(target) ? target
    : protobuf.common.get(target) ? target : path.join(rpcProtos, target);
details.loadSync(['google/rpc/status.proto', 'google/rpc/error_details.proto'].map((name) => path.join(rpcProtos, name)));

function call(stub, method, request) {
  return new Promise((resolve, reject) => {
    const options = { deadline: Date.now() + DEADLINE_MS };
    stub[method](request, options, (error, response) => (error ? reject(error) : resolve(response)));
  });
}

// The code of a refusal, with its details by type.
async function refusal(stub, method, request) {
  const error = await call(stub, method, request).then(
    () => { throw new Error(`${method} was not refused`); },
    (refused) => refused,
  );
  const [status] = error.metadata.get('grpc-status-details-bin');
  const found = { code: grpc.status[error.code] };
  for (const any of details.lookupType('google.rpc.Status').decode(status).details) {
    const name = any.type_url.split('/').pop();
    found[name] = details.lookupType(name).decode(any.value).toJSON();
  }
  return found;
}

// Reads a watch until a response is the one that is looked for.
function watch(stream, isLast) {
  return new Promise((resolve, reject) => {
    stream.on('data', (response) => {
      if (isLast(response)) {
        stream.cancel();
        resolve(response);
      }
    });
    stream.on('error', reject);
    stream.on('end', () => reject(new Error('the watch ended')));
  });
}

async function main() {
  const deadline = { deadline: Date.now() + DEADLINE_MS };
  const found = {};
  found.worker = (await call(fleet, 'GetWorker', { worker: 'alpha' })).worker;
  found.gpus = (await call(fleet, 'ListGpus', { worker: 'alpha' })).gpus.map(({ gpu }) => [gpu.slot, gpu.uuid]);
  const creation = {
    request_id: 'r-1',
    name: 'foreign',
    spec: { arguments: ['true'], labels: { team: 'a' }, resources: { gpu_count: 1 } },
  };
  const created = await call(workloads, 'CreateWorkload', creation);
  const again = await call(workloads, 'CreateWorkload', creation);
  found.same_command = created.command.command_id === again.command.command_id;
  const ended = await watch(
    commands.WatchCommand({ command_id: created.command.command_id }, deadline),
    ({ command }) => command.end_time !== null,
  );
  found.command = [ended.command.state, ended.command.operation.kind];
  const snapshot = await watch(
    workloads.WatchWorkloads({}, deadline),
    (response) => response.bookmark !== undefined && response.bookmark.snapshot_end,
  );
  found.resume_token = snapshot.resume_token;
  found.events = (await call(events, 'ListEvents', {})).events.map(({ kind }) => kind);
  found.unknown = await refusal(workloads, 'GetWorkload', { workload: 'nobody' });
  const negative = { spec: { arguments: ['true'], resources: { gpu_count: -1 } } };
  found.negative = await refusal(workloads, 'CreateWorkload', negative);
  console.log(JSON.stringify(found));
}

main().then(
  () => process.exit(0),
  (error) => { console.error(error); process.exit(1); },
);
