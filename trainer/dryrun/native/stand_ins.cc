// What MindSpore's Ascend backend finds in the place of CANN in a dry run: functions that do nothing, return 0 and note
// what they were asked for. `symbols.txt` lists the functions that do not even take notes; see `stand_ins.py`.
//
// The notes are read through `dry_run_notes`, a line for each: kind, name, number. They are of two kinds:
//   aclop       a kernel of the legacy library, GE's, that is prepared
//   collective  a call of HCCL, with its bytes; in the order of calls
#include <dlfcn.h>
#include <pthread.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace ge {
struct StatusFactory {
  std::map<uint32_t, std::string> texts;
  static StatusFactory *Instance();
};
__attribute__((visibility("default"))) StatusFactory *StatusFactory::Instance() {
  static StatusFactory factory;
  return &factory;
}
}  // namespace ge

EXPORTED long stand_in() { return 0; }
// For constructors of GE's objects of 16 bytes.
EXPORTED void stand_in_object(void *object) { std::memset(object, 0, 16); }

// ---- notes ----------------------------------------------------------------------------------------------------------

namespace {
// Made when first used, because other libraries ask for functions before this one's constructors run, and never freed.
struct Notes {
  std::mutex mutex;
  std::map<std::string, long> kernels;  // name -> how often
  std::vector<std::string> collectives;
  std::string text;
};
Notes &notes() {
  static Notes *all = new Notes;
  return *all;
}
void note_kernel(const std::string &name) {
  std::lock_guard<std::mutex> lock(notes().mutex);
  ++notes().kernels[name];
}
}  // namespace

EXPORTED void dry_run_forget() {
  std::lock_guard<std::mutex> lock(notes().mutex);
  notes().kernels.clear();
  notes().collectives.clear();
}

EXPORTED const char *dry_run_notes() {
  std::lock_guard<std::mutex> lock(notes().mutex);
  std::string &text = notes().text;
  text.clear();
  for (auto &each : notes().kernels) text += "aclop " + each.first + " " + std::to_string(each.second) + "\n";
  for (auto &each : notes().collectives) text += "collective " + each + "\n";
  return text.c_str();
}

// ---- legacy kernels: MindSpore converts their inputs and attributes for GE's operators, which are not there ----------

EXPORTED long
_ZN9mindspore6device6ascend12AclConverter21ConvertInputToAclAttrERKSt6vectorIPNS_6kernel12KernelTensorESaIS6_EERKSs(
    void *, void *, const std::string *name) {
  note_kernel(*name);
  return 0;
}
EXPORTED long
_ZN9mindspore6device6ascend12AclConverter16ConvertToAclAttrERKN10robin_hood6detail5TableILb0ELm80ESsSt10shared_ptrINS_5ValueEENS3_4hashISsvEESt8equal_toISsEEERKSsPSt6vectorISsSaISsEE(
    void *, void *, const std::string *name) {
  note_kernel(*name);
  return 0;
}
EXPORTED int aclopCompileAndExecuteV2(const char *, ...) { return 0; }
EXPORTED int aclopCompileAndExecute(const char *, ...) { return 0; }

// ---- libraries and functions that are looked up by name ---------------------------------------------------------------

namespace {
template <typename Type>
Type libc_function(const char *name) {
  for (const char *version : {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"}) {
    if (void *found = dlvsym(RTLD_NEXT, name, version)) return reinterpret_cast<Type>(found);
  }
  return nullptr;
}
bool starts_with_one_of(const char *name, std::initializer_list<const char *> beginnings) {
  for (const char *beginning : beginnings) {
    if (!std::strncmp(name, beginning, std::strlen(beginning))) return true;
  }
  return false;
}
bool contains_one_of(const char *text, std::initializer_list<const char *> parts) {
  for (const char *part : parts) {
    if (std::strstr(text, part)) return true;
  }
  return false;
}
}  // namespace

EXPORTED void *dlsym(void *library, const char *name) {
  static auto original = libc_function<void *(*)(void *, const char *)>("dlsym");
  void *found = original(library, name);
  if (!found && starts_with_one_of(name, {"acl", "Hccl", "InitHugeMem", "UnInitHugeMem", "ReleaseHugeMem",
                                          "InitPTACache", "PTA", "InitCache", "CanUsePTA"})) {
    return reinterpret_cast<void *>(stand_in);
  }
  return found;
}
EXPORTED void *dlopen(const char *file, int mode) {
  static auto original = libc_function<void *(*)(const char *, int)>("dlopen");
  if (file && contains_one_of(file, {"libopapi", "libcust_opapi", "libnnopbase", "libhccl.so", "libaclnn"})) {
    const char *folder = std::getenv("ASCEND_HOME_PATH");
    return original((std::string(folder ? folder : "") + "/lib64/libascendcl.so").c_str(), mode);
  }
  return original(file, mode);
}

// ---- threads ----------------------------------------------------------------------------------------------------------

// Two threads of MindSpore's wait for reports of the device, in calls that return at once in a dry run: each would take a
// whole core. They end before they begin.
namespace {
void *no_reports(void *) { return nullptr; }
}  // namespace
EXPORTED int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *given) {
  using Create = int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
  static auto original = libc_function<Create>("pthread_create");
  Dl_info place;
  bool waits = dladdr(reinterpret_cast<void *>(start), &place) && place.dli_fname &&
               std::strstr(place.dli_fname, "libmindspore_ascend_res_manager");
  return original(thread, attributes, waits ? no_reports : start, given);
}

// ---- HCCL -------------------------------------------------------------------------------------------------------------

namespace {
const char *const kTypes[] = {"int8",   "int16",  "int32",  "float16", "float32", "int64",
                              "uint64", "uint8",  "uint16", "uint32",  "float64", "bfloat16"};
const int kSizes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};

long note_collective(const char *name, uint64_t count, int type) {
  bool known = type >= 0 && type < 12;
  std::lock_guard<std::mutex> lock(notes().mutex);
  notes().collectives.push_back(std::string(name) + " " + (known ? kTypes[type] : "bytes") + " " +
                                std::to_string(count * (known ? kSizes[type] : 1)));
  return 0;
}
}  // namespace

// MindSpore's own functions around HCCL's, which return at once in a dry run: these are called in their place. Counts are
// elements that the rank sends, for a gather those of one rank.
#define ADAPTER(name) _ZNK9mindspore4hccl11HcclAdapter##name
#define NOTED(symbol, name, arguments) \
  EXPORTED long ADAPTER(symbol) arguments { return note_collective(name, count, type); }

NOTED(13HcclAllReduceEPvS2_m12HcclDataType12HcclReduceOpS2_S2_, "AllReduce",
      (void *, void *, void *, uint64_t count, int type, int, void *, void *))
NOTED(13HcclAllGatherEPvS2_m12HcclDataTypeS2_S2_, "AllGather",
      (void *, void *, void *, uint64_t count, int type, void *, void *))
NOTED(17HcclReduceScatterEPvS2_m12HcclDataType12HcclReduceOpS2_S2_, "ReduceScatter",
      (void *, void *, void *, uint64_t count, int type, int, void *, void *))
NOTED(13HcclBroadcastEPvm12HcclDataTypejS2_S2_, "Broadcast",
      (void *, void *, uint64_t count, int type, unsigned, void *, void *))
NOTED(10HcclReduceEPvS2_m12HcclDataType12HcclReduceOpjS2_S2_, "Reduce",
      (void *, void *, void *, uint64_t count, int type, int, unsigned, void *, void *))
NOTED(11HcclScatterEPvS2_m12HcclDataTypejS2_S2_, "Scatter",
      (void *, void *, void *, uint64_t count, int type, unsigned, void *, void *))
NOTED(8HcclSendEPvm12HcclDataTypejS2_S2_, "Send",
      (void *, void *, uint64_t count, int type, unsigned, void *, void *))
NOTED(8HcclRecvEPvm12HcclDataTypejS2_S2_, "Receive",
      (void *, void *, uint64_t count, int type, unsigned, void *, void *))

namespace {
struct AllToAllParams {
  uint64_t send, receive;
};
struct AllToAllVParams {
  std::vector<uint64_t> send, send_offsets, receive, receive_offsets;
};
struct VectorParams {  // of AllGatherV and ReduceScatterV
  uint64_t count;
  std::vector<uint64_t> counts, offsets;
};
}  // namespace
EXPORTED long ADAPTER(12HcclAllToAllEPvS2_NS0_18HcclAllToAllParamsE12HcclDataTypeS2_S2_)(
    void *, void *, void *, AllToAllParams given, int type, void *, void *) {
  return note_collective("AllToAll", given.send, type);
}
// A struct with vectors is passed by its address.
EXPORTED long ADAPTER(13HcclAlltoAllVEPvS2_NS0_19HcclAllToAllVParamsE12HcclDataTypeS2_S2_)(
    void *, void *, void *, const AllToAllVParams *given, int type, void *, void *) {
  uint64_t count = 0;
  for (uint64_t each : given->send) count += each;
  return note_collective("AllToAllV", count, type);
}
EXPORTED long ADAPTER(14HcclAllGatherVEPvS2_NS0_20HcclAllGatherVParamsE12HcclDataTypeS2_S2_)(
    void *, void *, void *, const VectorParams *given, int type, void *, void *) {
  return note_collective("AllGatherV", given->count, type);
}
EXPORTED long ADAPTER(18HcclReduceScatterVEPvS2_NS0_24HcclReduceScatterVParamsE12HcclDataType12HcclReduceOpS2_S2_)(
    void *, void *, void *, const VectorParams *given, int type, int, void *, void *) {
  return note_collective("ReduceScatterV", given->count, type);
}
EXPORTED long ADAPTER(11HcclBarrierEPvS2_)(void *, void *, void *) { return note_collective("Barrier", 0, 12); }
