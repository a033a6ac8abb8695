// What MindSpore's Ascend backend finds in the place of CANN in a dry run: functions that do nothing and return 0. Most of
// them are listed in `symbols.txt`, see `stand_ins.py`; those that must do more are here.
#include <dlfcn.h>
#include <pthread.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <map>
#include <mutex>
#include <set>
#include <string>

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

// The compiler of fused kernels (jit_level O1) reads the name of the chip and numbers of CANN's version. A chip of the 910B
// series; the version that stand_ins.py gives too.
EXPORTED const char *aclrtGetSocName() { return "Ascend910B2"; }
struct CannVersion {
  char version[128], major[64], minor[64], release[64], patch[64], reserved[128];
};
EXPORTED int aclsysGetCANNVersion(int package, CannVersion *version) {
  *version = {"8.5.0", "8", "5", "0", "0", ""};
  return 0;
}

// ---- notes ----------------------------------------------------------------------------------------------------------

namespace {
// Made when first used, because other libraries ask for functions before this one's constructors run, and never freed.
struct Notes {
  std::mutex mutex;
  std::set<std::string> kernels;  // legacy ones that were prepared
  std::string text;
};
Notes &notes() {
  static Notes *all = new Notes;
  return *all;
}
void note_kernel(const std::string &name) {
  std::lock_guard<std::mutex> lock(notes().mutex);
  notes().kernels.insert(name);
}
}  // namespace

// The names of the legacy kernels that were prepared, a line each.
EXPORTED const char *dry_run_kernels() {
  std::lock_guard<std::mutex> lock(notes().mutex);
  std::string &text = notes().text;
  text.clear();
  for (auto &each : notes().kernels) text += each + "\n";
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
